"""The commands that show runs in a browser: `cotune view` and `cotune report`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from cotune.cli.command import add_address, add_command, add_repeated, prices
from cotune.terminal import tell

_PRICE = "money per million tokens, for the cost of what a provider's model answered"


def add_view(commands: Any) -> None:
    """Add `cotune view`."""

    def run(a: argparse.Namespace) -> int:
        from cotune.integrations.web.viewer.server import view

        token = a.token or os.environ.get("COTUNE_TOKEN")
        view(a.runs or ["runs"], tell, host=a.host, port=a.port, token=token, prices=prices(a.price))
        return 0

    text = "look at runs in the browser: curves, episodes, groups, tasks; of one under way, of several together"
    command = add_command(commands, "view", run, text, "cotune view runs/r1 runs/r2", extra="view")
    command.add_argument(
        "runs", nargs="*", metavar="RUN", help="run folder, records file, or folder of runs (default: runs)"
    )
    add_address(command, port=8200)
    add_repeated(command, "--price", "MODEL=PROMPT/COMPLETION", _PRICE)


def add_report(commands: Any) -> None:
    """Add `cotune report`."""

    def run(a: argparse.Namespace) -> int:
        from cotune.integrations.web.viewer.report import write_report

        write_report(a.run_folder, a.out, prices(a.price))
        tell(f"wrote {a.out}, {a.out.stat().st_size / 1024:,.0f} KB: it opens in any browser, without a network")
        return 0

    text = "write one HTML file to send to somebody: figures with intervals, curves, episodes before and after"
    command = add_command(commands, "report", run, text, "cotune report runs/r1 --out report.html", extra="view")
    command.add_argument("run_folder", metavar="RUN", help="run folder or records file")
    command.add_argument("--out", required=True, type=Path, metavar="FILE", help="HTML file to write")
    add_repeated(command, "--price", "MODEL=PROMPT/COMPLETION", _PRICE)
