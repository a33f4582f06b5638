"""`cotune prompts diff`."""

from __future__ import annotations

import argparse

from cotune.cli.command import Parser
from cotune.terminal import tell, terminal

TEXT = "Show the changes of prompts, part by part"
EXAMPLE = "cotune prompts diff prompts.json"


def arguments(command: Parser) -> None:
    command.add_argument("prompts", metavar="PROMPTS", help="prompts.json, or a folder that has one")
    command.add_argument(
        "other", metavar="OTHER", nargs="?", help="a later file to compare with (default: the old texts)"
    )


def run(a: argparse.Namespace) -> int:
    """Show how the texts of prompts were changed: between two files, or in one file from the application's own texts.

    Two files are compared part by part. Parts that only the first has are named.
    """
    from cotune.cli.printing.prompts import shown_diff
    from cotune.prompts.file import read_prompts

    first = read_prompts(a.prompts)
    if a.other:
        # Parts of two files are the same part if they replace the same text at the same place, whatever their names.
        other_parts = {(part.kind, part.key, part.old, part.roles): part for part in read_prompts(a.other).parts}
        pairs = []
        missing = []
        for part in first.parts:
            other_part = other_parts.get((part.kind, part.key, part.old, part.roles))
            if other_part is None:
                missing.append(part.name)
            elif other_part.now != part.now:
                pairs.append((part, part.now, other_part.now))
        if missing:
            tell(f"not in {a.other}: {', '.join(missing)}")
    else:
        pairs = [(part, part.old, part.now) for part in first.parts if part.edited]
    if not pairs:
        tell("nothing is changed")
        return 0
    terminal().print(shown_diff(pairs))
    return 0
