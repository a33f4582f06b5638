"""`cotune prompts export`."""

from __future__ import annotations

import argparse
from pathlib import Path

from cotune.cli.command import Parser
from cotune.errors import ConfigError
from cotune.terminal import tell

TEXT = "Write edited prompts as markdown, to paste into the application's source"
EXAMPLE = "cotune prompts export prompts.json --out prompts/"


def arguments(command: Parser) -> None:
    command.add_argument("prompts", metavar="PROMPTS", help="prompts.json, or a folder that has one")
    command.add_argument(
        "--out", default="prompts", metavar="DIR", help="folder for a page of each role (default: %(default)s)"
    )


def run(a: argparse.Namespace) -> int:
    """Write the edited parts of prompts as Markdown pages, for people to read and copy into their application."""
    from cotune.prompts.file import read_prompts
    from cotune.prompts.markdown import pages
    from cotune.storage.whole_file import whole_file

    page_texts = pages(read_prompts(a.prompts))
    if not page_texts:
        raise ConfigError("prompts", a.prompts, "has no edited part", "Edit one: cotune prompts edit FILE --part NAME.")
    folder = Path(a.out)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in page_texts.items():
        with whole_file(folder / name) as file:
            file.write(text.encode())
        tell(f"written: {folder / name}")
    return 0
