"""The site builds as `make docs` builds it, without a warning, and needs nothing from the network."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_page_is_built(site: Path) -> None:
    pages = {page.relative_to(ROOT / "docs").with_suffix(".html") for page in (ROOT / "docs").rglob("*.md")}
    assert pages <= {page.relative_to(site) for page in site.rglob("*.html")}


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    loaded = re.compile(
        r'<(?:script|img|iframe)[^>]+src="?https?://[^">]+|<link[^>]+href="?https?://[^">]+|url\(https?://'
    )
    files = [*site.rglob("*.html"), *site.rglob("*.css")]
    assert [(file.name, found) for file in files for found in loaded.findall(file.read_text())] == []
