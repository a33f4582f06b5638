"""Runs that learn from records or from a teacher are shown as what they are."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cotune.integrations.web.viewer.report import report
from cotune.integrations.web.viewer.server import viewing
from cotune.reading.headline import headline
from cotune.reading.run import OpenedRun
from cotune.trainer.train import train
from tests.integrations.web.viewer.test_pages import text
from tests.trainer.records.records import traced
from tests.trainer.tiny_app import application, build_base, converse


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of supervised learning from recorded answers."""
    folder = tmp_path_factory.mktemp("learned")
    settings = {
        "model": str(build_base(folder / "base")),
        "recipe": "sft",
        "records": {"path": str(traced(folder / "traced"))},
        "steps": 2,
        "tasks_per_step": 6,
        "evaluation": {"every": 1},
        "learner": {"lr": 3e-3},
    }
    train(application(converse), None, settings, out=folder / "sft", console=Console(file=io.StringIO()))
    return folder / "sft"


def test_a_run_from_records_says_what_it_learned_from(learned: Path) -> None:
    with viewing([learned]) as server:
        said = text(server.url)
        groups = text(f"{server.url}/run/sft/groups")
        curves = text(f"{server.url}/run/sft/curves")
    assert "held-out loss of first" in said and "recipe sft" in said and "plan" not in said
    assert (
        f"learned from recorded answers and sampled none itself. The records are in {learned.parent / 'traced'}" in said
    )
    assert re.search(r"first \d+ 5\b", said) and "Latest episodes" not in said and "No calls are recorded" not in said
    assert "Held-out loss" in said and "Episodes Groups Tasks" not in said
    assert "it has no episodes of its own" in groups and "Loss on records that are not trained on" in curves


def test_the_report_of_a_run_from_records_says_so_too(learned: Path) -> None:
    opened = OpenedRun(learned, "sft")
    said = " ".join(re.sub(r"<[^>]+>", " ", report(opened, {})).split())
    opened.close()
    assert "learned from records" in said and "What it learned from" in said and "No calls are recorded" not in said


def line(step: int, **roles: dict[str, float]) -> dict[str, Any]:
    return {"step": step, "outcome": {}, "roles": roles}


def test_the_held_out_loss_is_that_of_the_weights_that_are_kept() -> None:
    lines = [line(step, first={"held_out_loss": loss}) for step, loss in enumerate((3.0, 2.0, 2.5))]
    (found,) = headline(lines, []).changes
    assert (found.first_of, found.last_of, found.last.mean) == ("step 1", "step 2", 2.0)


def test_pairs_ranked_right_and_the_distance_from_a_teacher_are_told() -> None:
    lines = [line(step, first={"loss": 0.7, "accuracy": share}) for step, share in enumerate((0.5, 1.0))]
    assert [(one.name, one.last.mean, one.percent) for one in headline(lines, []).changes] == [
        ("loss of first", 0.7, False),
        ("pairs of first ranked right", 1.0, True),
    ]
    lines = [line(step, first={"kl": gap, "reward": 0.1}) for step, gap in enumerate((0.5, 0.25))]
    names = [one.name for one in headline(lines, [], taught=True).changes]
    assert names == ["distance of first from the teacher", "reward of first"]
    assert [one.name for one in headline(lines, []).changes] == ["reward of first"]
