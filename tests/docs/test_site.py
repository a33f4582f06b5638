"""The site builds as `make docs` builds it, without a warning, and needs nothing from the network."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. A warning (a link or an anchor that leads nowhere, a page outside of the navigation) fails."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {"PATH": "", "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert (built.returncode, built.stdout + built.stderr) == (0, "")
    return folder


def test_every_page_is_built(site: Path) -> None:
    pages = {page.relative_to(ROOT / "docs").with_suffix(".html") for page in (ROOT / "docs").rglob("*.md")}
    assert pages <= {page.relative_to(site) for page in site.rglob("*.html")}


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    loaded = re.compile(
        r'<(?:script|img|iframe)[^>]+src="?https?://[^">]+|<link[^>]+href="?https?://[^">]+|url\(https?://'
    )
    files = [*site.rglob("*.html"), *site.rglob("*.css")]
    assert [(file.name, found) for file in files for found in loaded.findall(file.read_text())] == []
