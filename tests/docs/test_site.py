"""The site builds as `make docs` builds it, without a warning, and needs nothing from the network."""

from __future__ import annotations

import ast
import html
import json
import re
import subprocess
import sys
from pathlib import Path

from cotune.algorithms.filters import REASONS
from cotune.cli.main import COMMANDS
from cotune.reading.metrics import registry

ROOT = Path(__file__).parents[2]


def test_every_page_is_built(built_site: Path) -> None:
    pages = {page.relative_to(ROOT / "docs").with_suffix(".html") for page in (ROOT / "docs").rglob("*.md")}
    assert pages <= {page.relative_to(built_site) for page in built_site.rglob("*.html")}


def test_nothing_is_loaded_from_elsewhere(built_site: Path) -> None:
    loaded = re.compile(
        r'<(?:script|img|iframe)[^>]+src="?https?://[^">]+|<link[^>]+href="?https?://[^">]+|url\(https?://'
    )
    files = [*built_site.rglob("*.html"), *built_site.rglob("*.css")]
    assert [(file.name, found) for file in files for found in loaded.findall(file.read_text())] == []


def test_every_part_that_a_page_asks_for_is_made(built_site: Path) -> None:
    assert [file.name for file in built_site.rglob("*.html") if "<!-- generated" in file.read_text()] == []


def test_what_is_generated_is_fresh() -> None:
    """Each page has the parts that the code makes today, where a forge shows it too."""
    folder = str(ROOT / "docs" / "generate")
    code = "from pages import made; print([page.name for page, text in made() if page.read_text() != text])"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n", "run: python docs/generate/pages.py"


def test_links_from_outside_of_the_site_lead_to_headings(built_site: Path) -> None:
    outside = [*ROOT.glob("*.md"), *ROOT.glob("examples/**/*.md"), *ROOT.glob("benchmarks/*.md")]
    links = [link for file in outside for link in re.findall(r"docs/([\w/-]+)\.md#([\w-]+)", file.read_text())]
    assert links and [to for to in links if f'id="{to[1]}"' not in (built_site / f"{to[0]}.html").read_text()] == []


def test_the_search_finds_commands_fields_figures_and_reasons(built_site: Path) -> None:
    found = json.loads((built_site / "search" / "search_index.json").read_text())["docs"]
    text = " ".join(entry["text"] + entry["title"] for entry in found)
    asked = {*REASONS, *(f"cotune {name}" for group in COMMANDS.values() for name in group)}
    asked |= {name for group in registry().values() for name in group}
    asked |= {"learner.lr", "plan.kind", "evaluation.keep_best", "cluster.address"}
    assert {name for name in asked if name not in text} == set()


def words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text))


def raised() -> set[str]:
    """What stands word for word in the errors that are raised: pieces of four words and more."""
    files = [file for layer in ("core", "integrations", "adapters", "trainer") for file in (ROOT / layer).rglob("*.py")]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Raise)]
    made = [node.exc for node in nodes if isinstance(node.exc, ast.Call)]
    ours = ("ConfigError", "RunError", "RecordError", "AdapterError", "WorkflowError", "SamplerError", "RequestError")
    told = [one for call in made if ast.unparse(call.func) in ours for arg in call.args for one in ast.walk(arg)]
    found = [one.value for one in told if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    # A name of a page of the docs is a link there.
    return {words(text) for text in found if len(words(text).split()) > 3 and "docs/" not in text}


def test_the_search_finds_errors_by_the_words_that_stay_the_same(built_site: Path) -> None:
    found = json.loads((built_site / "search" / "search_index.json").read_text())["docs"]
    told = " ".join(one["text"] for one in found if one["location"].startswith("reference/errors"))
    text = words(html.unescape(re.sub(r"</?\w+>", " ", told)))
    asked = raised()
    assert len(asked) > 500 and sorted(one for one in asked if one not in text) == []
    assert "a group of one has no baseline" in text  # of a value that is given a name first
