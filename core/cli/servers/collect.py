"""`cotune collect`."""

from __future__ import annotations

import argparse
import os

from cotune.cli.command import Parser, add_address, add_fields, fields_of
from cotune.terminal import tell

EXAMPLE = "cotune collect --store records.db"
EXTRA = "collect"


def arguments(command: Parser) -> None:
    """Add the arguments of `cotune collect`."""
    from cotune.integrations.web.http.limits import BodyLimits

    command.add_argument(
        "--store", required=True, metavar="ADDRESS", help="run folder, records file or postgresql://..."
    )
    add_address(command, port=4319)
    command.add_argument(
        "--tokens",
        metavar="FILE",
        help='TOML file with a token for each application, in lines such as: desk = "TOKEN"; such a token allows only '
        "the records of its application, --token the records of all",
    )
    add_fields(command, "max_body", table=BodyLimits)


def run(a: argparse.Namespace) -> int:
    """Start the collector: a server that stores the records which applications send."""
    from cotune.integrations.collect.apps import Apps, read_tokens
    from cotune.integrations.collect.server import collect
    from cotune.integrations.web.http.limits import BodyLimits

    apps = Apps(a.token or os.environ.get("COTUNE_TOKEN"), read_tokens(a.tokens) if a.tokens else None)
    collect(a.store, apps, tell, limits=BodyLimits(**fields_of(a, BodyLimits)), host=a.host, port=a.port)
    return 0
