"""Writes the parts of the documentation that are made from the code and from measurements.

    python docs/generate/pages.py

A part stands on its page between `<!-- generated: NAME -->` and `<!-- end -->`, so that it is read wherever the page
is. Run this after a change of commands, fields, metrics, recipes, public names or figures; a test fails where it was
not.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from command_line import commands
from configuration import fields, method_attributes, search_fields
from figures import TABLES
from metrics import figures as metrics
from metrics import reasons
from public_names import function_table, type_table
from recipes import methods, published, recipes

DOCS = Path(__file__).parents[1]
RESULTS = DOCS.parent / "benchmarks" / "RESULTS.md"
"""All tables of measurements; the documentation says what they mean."""
MARKED = re.compile(r"^<!-- generated: ([^\n]+) -->\n(.*?)^<!-- end -->$", re.MULTILINE | re.DOTALL)
"""A part with its name and text."""
PARTS: Mapping[str, Callable[[], str]] = {
    "public names": function_table,
    "types": type_table,
    "commands": commands,
    "fields of the configuration": fields,
    "attributes of a method": method_attributes,
    "options of a search for prompts": search_fields,
    "reasons": reasons,
    **{f"metrics of {of}": functools.partial(metrics, of) for of in ("candidates", "update", "records", "policies")},
    "errors": lambda: "`make docs` writes the list.",
    "recipes": recipes,
    "methods": methods,
    "published systems": published,
    "tested versions": (Path(__file__).parent / "tested_versions.txt").read_text,
    **{f"figures {name}": table for name, table in TABLES.items()},
}
"""By the name on a page, what makes a part in Markdown."""


def made() -> Iterator[tuple[Path, str]]:
    """Each page with parts, and its text as it should be. Raises KeyError for a part that nothing makes."""
    for page in [*sorted(DOCS.rglob("*.md")), RESULTS]:
        text = page.read_text()
        if MARKED.search(text):
            yield page, MARKED.sub(_made, text)


def _made(part: re.Match[str]) -> str:
    text = re.sub(r"[ \t]+$", "", PARTS[part[1]]().strip("\n"), flags=re.MULTILINE)
    return f"<!-- generated: {part[1]} -->\n\n{text}\n\n<!-- end -->"


if __name__ == "__main__":
    for page, text in made():
        page.write_text(text)
