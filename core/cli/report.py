"""`cotune report`."""

from __future__ import annotations

import argparse
from pathlib import Path

from cotune.cli.command import RECORDS, Parser, add_repeated, prices
from cotune.cli.servers.view import PRICE
from cotune.terminal import tell

EXAMPLE = "cotune report runs/r1 --out report.html"
EXTRA = "view"


def arguments(command: Parser) -> None:
    command.add_argument("run", metavar="RUN", help=RECORDS)
    command.add_argument("--out", required=True, type=Path, metavar="FILE", help="HTML file to write")
    add_repeated(command, "--price", "MODEL=PROMPT/COMPLETION", PRICE)


def run(a: argparse.Namespace) -> int:
    from cotune.integrations.web.viewer.report import write_report

    write_report(a.run, a.out, prices(a.price))
    tell(f"wrote {a.out}, {a.out.stat().st_size / 1024:,.0f} KB: it opens in any browser, without a network")
    return 0
