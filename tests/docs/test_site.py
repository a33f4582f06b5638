"""The site builds as `make docs` builds it, without a warning, and needs nothing from the network."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from cotune.algorithms.filters import REASONS
from cotune.cli.main import COMMANDS
from cotune.reading.metrics import registry

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


def test_every_part_that_a_page_asks_for_is_made(site: Path) -> None:
    assert [file.name for file in site.rglob("*.html") if "<!-- generated" in file.read_text()] == []


def test_what_is_generated_is_fresh() -> None:
    """Each page has the parts that the code makes today, where a forge shows it too."""
    folder = str(ROOT / "docs" / "generate")
    code = "from pages import made; print([page.name for page, text in made() if page.read_text() != text])"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n", "run: python docs/generate/pages.py"


def test_links_from_outside_of_the_site_lead_to_headings(site: Path) -> None:
    outside = [*ROOT.glob("*.md"), *ROOT.glob("examples/**/*.md")]
    links = [link for file in outside for link in re.findall(r"docs/([\w/-]+)\.md#([\w-]+)", file.read_text())]
    assert links and [to for to in links if f'id="{to[1]}"' not in (site / f"{to[0]}.html").read_text()] == []


def test_the_search_finds_commands_fields_figures_and_reasons(site: Path) -> None:
    found = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    text = " ".join(entry["text"] + entry["title"] for entry in found)
    asked = {*REASONS, *(f"cotune {name}" for group in COMMANDS.values() for name in group)}
    asked |= {name for group in registry().values() for name in group}
    asked |= {"learner.lr", "plan.kind", "evaluation.keep_best", "cluster.address"}
    assert {name for name in asked if name not in text} == set()
