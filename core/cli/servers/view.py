"""`cotune view`."""

from __future__ import annotations

import argparse
import os

from cotune.cli.command import Parser, add_address, add_repeated, prices
from cotune.terminal import tell

EXAMPLE = "cotune view runs/r1 runs/r2"
EXTRA = "view"
PRICE = "price per million tokens of a provider's model, for the costs that are shown"


def arguments(command: Parser) -> None:
    command.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="run folder, records file, postgresql://..., or folder of runs (default: runs)",
    )
    add_address(command, port=8200)
    add_repeated(command, "--price", "MODEL=PROMPT/COMPLETION", PRICE)


def run(a: argparse.Namespace) -> int:
    from cotune.integrations.web.viewer.server import view

    token = a.token or os.environ.get("COTUNE_TOKEN")
    view(a.runs or ["runs"], tell, host=a.host, port=a.port, token=token, prices=prices(a.price))
    return 0
