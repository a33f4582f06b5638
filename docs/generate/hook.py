"""A hook of MkDocs: on the site, the public names are shown by mkdocstrings, with signature and docstring, and errors
are listed, which change too often to be checked in."""

from __future__ import annotations

import re
from typing import Any

from errors import errors
from pages import MARKED
from public_names import functions, types

ON_THE_SITE = {"public names": functions, "types": types, "errors": errors}
"""Parts that the site shows in full; elsewhere they are a table, or a sentence."""


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by MkDocs with the text of each page."""

    def shown(part: re.Match[str]) -> str:
        return ON_THE_SITE[part[1]]() if part[1] in ON_THE_SITE else part[2]

    return MARKED.sub(shown, markdown)
