"""A run whose roles share a policy shows each role's share of the gradient, and names a role that holds most of it."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest
from rich.console import Console

from cotune.integrations.web.viewer.report import report
from cotune.methods import AtGrpo
from cotune.reading.facts import find_troubles
from cotune.reading.run import OpenedRun
from cotune.storage.metrics_file import StepMetrics
from cotune.trainer.reporting.progress import summary
from tests.trainer.conftest import Trainer
from tests.trainer.tiny_app import application, ask, letters

SETTINGS = {"policies": "shared", "rewards": {"team_weight": 0.0}}
WARNING = "Role 'first' has held over 80% of the gradient of policy 'shared' in the mean of the last 5 steps"


class Balanced(AtGrpo):
    """AT-GRPO with a balanced gradient."""

    loss = msgspec.structs.replace(AtGrpo.loss, balance="equal")


async def one_talks_and_one_decides(task: Any) -> dict[str, float]:
    """Twelve calls of the first role, with four tokens each, for one call of the second, with one token."""
    for turn in range(12):
        await ask("first", f"say {task['letter']} {'abcdefghijkl'[turn]}")
    await ask("second", f"decide {task['letter']}", max_tokens=1)
    return {"team": 0.0}


def shares(trainer: Trainer, role: str) -> list[float]:
    return [line["roles"][role]["gradient_share"] for line in trainer.metrics()]


def test_a_run_names_a_role_that_holds_most_of_the_gradient(trainer: Trainer) -> None:
    app = application(one_talks_and_one_decides, first=letters, second=letters)
    trainer(app, steps=6, **SETTINGS)
    first, second = shares(trainer, "first"), shares(trainer, "second")
    assert second == pytest.approx([1.0 - share for share in first])
    assert sum(first) / len(first) > 0.8

    # The warning comes with the fifth step, and is shown once.
    lines = trainer.metrics()
    assert [any(WARNING in note for note in line["notes"]) for line in lines] == [False] * 4 + [True] * 2
    assert " ".join(trainer.said.split()).count(WARNING) == 1

    # The step's line, and the report.
    step = msgspec.convert(lines[-1], StepMetrics)
    heard = io.StringIO()
    Console(file=heard, width=1000).print(summary(step))
    assert f"gradient: first {first[-1]:.0%}  second {1 - first[-1]:.0%}" in heard.getvalue()
    with OpenedRun(trainer.folder / "run") as run:
        named = [trouble.text for trouble in find_troubles(run) if trouble.kind == "gradient"]
        page = report(run, {})
    mean = sum(first) / len(first)
    assert named == [f"role first had {mean:.0%} of the gradient of a policy that it shares, in the mean of the steps"]
    assert named[0] in page and "Share of the gradient" in page


def test_a_resumed_run_counts_the_steps_before_it(trainer: Trainer) -> None:
    app = application(one_talks_and_one_decides, first=letters, second=letters)
    trainer(app, steps=4, **SETTINGS)
    trainer.resume(app, steps=6)
    warned = [any(WARNING in note for note in line["notes"]) for line in trainer.metrics()]
    assert warned == [False] * 4 + [True] * 2


def test_a_balanced_run_gives_both_roles_the_same_share(trainer: Trainer) -> None:
    app = application(one_talks_and_one_decides, first=letters, second=letters)
    trainer(app, steps=2, recipe=f"{__file__}:Balanced", **SETTINGS)
    assert shares(trainer, "first") == pytest.approx([0.5, 0.5], abs=0.02)


def test_a_policy_of_one_role_has_no_share(trainer: Trainer) -> None:
    trainer(application(first=letters, second=letters), **{**SETTINGS, "policies": "lora"}, steps=1)
    assert not [role for role, figures in trainer.metrics()[0]["roles"].items() if "gradient_share" in figures]


def test_a_role_that_learns_alone_in_a_step_has_the_whole_gradient(trainer: Trainer) -> None:
    """Rewards of the second role are always equal, so its groups are left out."""
    app = application(first=letters, second=lambda candidate, call, task: 0.5)
    trainer(app, steps=1, **{**SETTINGS, "rewards": {"team_weight": 0.0, "zero_variance": True}})
    assert (shares(trainer, "first"), shares(trainer, "second")) == ([1.0], [0.0])
