"""`cotune prompts`: each of its subcommands is a module of its name in this folder."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module

from cotune.cli.command import Parser, parser_texts

SUBCOMMANDS: Sequence[str] = ("show", "improve", "edit", "diff", "export")
"""A module has `TEXT`, `EXAMPLE`, `arguments` and `run`."""
EXAMPLE = "cotune prompts improve app:solve --tasks train.jsonl --reflection gpt-5-mini --out runs/p1"
EXTRA = "prompts"


def arguments(command: Parser) -> None:
    below = command.add_subparsers(dest="subcommand", required=True, metavar=" | ".join(SUBCOMMANDS))
    for name in SUBCOMMANDS:
        module = import_module(f"cotune.cli.prompts.{name}")
        sub = below.add_parser(name, help=module.TEXT, **parser_texts(module.TEXT, module.EXAMPLE))
        sub.set_defaults(run_subcommand=module.run)
        module.arguments(sub)


def run(a: argparse.Namespace) -> int:
    status: int = a.run_subcommand(a)
    return status
