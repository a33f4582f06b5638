"""A search for prompts is shown as before and after on the same tasks, not as the mean of both."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from cotune.cli.printing.overview import show_run
from cotune.reading.run import OpenedRun
from cotune.records.structs import Episode, RewardRecord, Task
from cotune.storage.open_store import open_store
from cotune.terminal import terminal


@pytest.fixture
def search(tmp_path: Path) -> Path:
    """Ten of fifteen held-out tasks solved before, fourteen after; and the episodes of the search itself."""
    folder = tmp_path / "search"
    folder.mkdir()
    with open_store(folder / "records.db") as store:
        for side, (prompts, solved) in enumerate((("", 10), ("p" * 64, 14))):
            for number in range(15):
                for phase in ("prompts", "prompts-held-out"):
                    good = float(number < solved)
                    one = f"{phase}{side}{number:02}"
                    task = Task(id=f"t{number}", input=number)
                    metrics = {"success": good}
                    ended = Episode(id=one, task=task, workflow="w", phase=phase, prompts=prompts, metrics=metrics)
                    store.write([ended, RewardRecord(one, "team", good)])
    return folder


def write_found(folder: Path, low: float, mean: float, high: float) -> None:
    held_out = {"tasks": 15, "base": 0.667, "best": 0.933, "difference": [low, mean, high], "level": 0.95}
    (folder / "prompts.json").write_text(json.dumps({"format": 1, "evaluation": {"held_out": held_out}}))


def shown(folder: Path) -> str:
    out = io.StringIO()
    terminal(width=200, file=out).print(show_run(folder))
    return out.getvalue()


def test_before_and_after_are_shown_with_a_verdict(search: Path) -> None:
    write_found(search, 0.1, 0.267, 0.433)
    text = shown(search)
    assert "held-out outcome: prompts before 0.667 over 15, best prompts 0.933 over 15" in text
    assert "the best prompts are better by 0.267 (95% interval 0.1 to 0.433) on 15 held-out tasks" in text
    assert "success of prompts" not in text and "80.0%" not in text


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [
        ((-0.1, 0.05, 0.2), "no difference shown: 0.05 (95% interval -0.1 to 0.2) on 15 held-out tasks"),
        ((-0.5, -0.3, -0.1), "the best prompts are worse by 0.3 (95% interval -0.5 to -0.1) on 15 held-out tasks"),
        ((None, 0.2, None), "no difference shown on 15 held-out tasks"),
    ],
)
def test_verdicts(search: Path, interval: tuple[float, float, float], verdict: str) -> None:
    write_found(search, *interval)
    with OpenedRun(search) as run:
        assert run.headline.verdict == verdict


def test_a_search_without_a_comparison_says_so(search: Path) -> None:
    with OpenedRun(search) as run:
        assert run.headline.changes == ()
        assert run.headline.verdict == "no comparison of prompts on held-out tasks is stored here"
