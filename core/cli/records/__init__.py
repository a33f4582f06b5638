"""`cotune records`: `score`, `judge` and `sft` are modules of their name in this folder, the others are in `upkeep`."""

from __future__ import annotations

import argparse

from cotune.cli.command import Parser, parser_texts
from cotune.cli.records import judge, score, sft, upkeep

EXAMPLE = "cotune records list postgresql://localhost/cotune"
FORMS = ("list", "score", "judge", "sft", "prune", "delete", "copy", "upgrade")


def arguments(command: Parser) -> None:
    """Add the subcommands of `cotune records`: those that list, use, and change a store, in the order of the
    help page.
    """
    forms = command.add_subparsers(dest="subcommand", required=True, metavar=" | ".join(FORMS))
    upkeep.add_list(forms)
    for name, module in (("score", score), ("judge", judge), ("sft", sft)):
        form = forms.add_parser(name, help=module.TEXT, **parser_texts(module.TEXT, module.EXAMPLE))
        form.set_defaults(run_subcommand=module.run)
        module.arguments(form)
    upkeep.add_changes(forms)


def run(a: argparse.Namespace) -> int:
    status: int = a.run_subcommand(a)
    return status
