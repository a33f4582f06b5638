"""What `mkdocs.yml` names as its hook: parts of the reference that are made from the code when the site is built.

A page says `<!-- generated: NAME -->` where such a part goes. What cannot be made fails the build.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from command_line import commands
from configuration import fields, overrides, search_fields
from figures import TABLES
from metrics import figures as metrics
from metrics import reasons
from mkdocs.exceptions import PluginError
from public_names import functions, types
from recipes import formulas, recipes

PARTS: Mapping[str, Callable[[], str]] = {
    "public names": functions,
    "types": types,
    "commands": commands,
    "fields of the configuration": fields,
    "settings of a recipe": overrides,
    "options of a search for prompts": search_fields,
    "reasons": reasons,
    **{f"metrics of {of}": functools.partial(metrics, of) for of in ("candidates", "update", "records", "policies")},
    "recipes": recipes,
    "formulas": formulas,
    "tested versions": (Path(__file__).parent / "tested_versions.txt").read_text,
    **{f"figures {name}": table for name, table in TABLES.items()},
}
"""By what a page calls it, what makes a part in Markdown."""


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by MkDocs with the text of each page."""

    def made(mark: re.Match[str]) -> str:
        if mark[1] not in PARTS:
            raise PluginError(f"{page.file.src_uri}: nothing makes {mark[1]!r}; known are {', '.join(PARTS)}")
        return PARTS[mark[1]]()

    return re.sub(r"^<!-- generated: (.+) -->$", made, markdown, flags=re.MULTILINE)
