"""CONTRIBUTING.md names files and names in them that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
LAYERS = ("core", "integrations", "adapters", "trainer", "tests", "docs", "benchmarks")
NAMES = {
    "COMMANDS": "core/cli/main.py",
    "_SERVERS": "core/cli/main.py",
    "_NEXT": "core/cli/printing/next_command.py",
    "ENGINES": "integrations/models/engines.py",
    "FRAMEWORKS": "integrations/apps/activation.py",
    "GENERAL": "core/algorithms/catalogue.py",
    "PACKAGES": "integrations/exchange/trackers/tracker.py",
    "PAGES": "integrations/web/viewer/pages.py",
    "PUBLISHED": "core/algorithms/catalogue.py",
    "SUPPORTED": "integrations/versions.py",
    "Tool": "core/config/train.py",
}


def test_every_file_that_is_named_exists():
    named = re.findall(rf"`((?:{'|'.join(LAYERS)})/[\w./]+)`", TEXT)
    assert len(named) > 30
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(("name", "file"), NAMES.items(), ids=NAMES)
def test_every_table_is_where_the_recipe_says(name: str, file: str):
    assert f"`{name}`" in TEXT and f"`{file}`" in TEXT
    assert re.search(rf"^{name}\b.*=", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)


def test_the_counter_of_turns_is_where_the_recipe_says():
    assert "`TurnCounter` in `core/recording/recorder.py`" in TEXT
    assert "\nclass TurnCounter:" in (ROOT / "core/recording/recorder.py").read_text(encoding="utf-8")
