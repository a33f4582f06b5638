"""The example without any reward: names become easier to say by what a rule behind an HTTP server prefers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cotune.storage.judge_ledger import totals_of
from examples.judged import demo
from examples.judged.rule_judge import ease
from tests.examples.applications import check_knows_nothing_of_cotune


def test_the_application_knows_nothing_of_cotune() -> None:
    check_knows_nothing_of_cotune(Path(demo.__file__).with_name("app.py"))


@pytest.mark.parametrize(("name", "turns"), [("banana", 5), ("strength", 2), ("", 0), ("a b", 0), ("iviv", 3)])
def test_the_rule_of_the_judge(name: str, turns: int) -> None:
    assert ease(name) == turns


def test_names_become_easier_to_say(in_thread: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "examples.judged.train", raising=False)
    monkeypatch.setenv("JUDGE_URL", "")
    first, last = demo.run(tmp_path, steps=8)
    assert len(first) == len(last) == 8 * 8
    assert demo.mean_ease(first) < 1.5 and demo.mean_ease(last) > 4.0
    spent = totals_of(tmp_path / "run")
    assert 0 < spent["requests"] <= 3 + 8 * 8 and spent.get("dropped", 0) == 0
