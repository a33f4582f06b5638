"""Steps in which all outcomes of a policy are equal: no update, no new version, no drift, and the run goes on."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from cotune.cli.main import main
from cotune.reading.groups import step_groups
from cotune.reading.run import OpenedRun
from cotune.trainer.run.checkpoint import load_checkpoint
from tests.trainer.conftest import Trainer
from tests.trainer.tiny_app import application, ask

INDEPENDENT = {"kind": "independent", "k": 2}


class Rewards:
    """Outcomes by step of the run: `differ` in steps named so, equal in all others; the steps' episodes in order."""

    def __init__(self, differ: set[int], episodes: int = 6, before: int = 3) -> None:
        self.differ, self.episodes, self.ran = differ, episodes, -before

    async def __call__(self, task: dict[str, str]) -> float:
        step, number = divmod(self.ran, self.episodes)
        self.ran += 1
        await ask("first", f"say {task['letter']}")
        if step in self.differ and task["letter"] == "b":
            await ask("rare", "only here")
        return float(step in self.differ and number < self.episodes // 2)


def trained(run: Path, step: int) -> dict[str, dict[str, np.ndarray]]:
    folder = run / "checkpoints" / f"step-{step:06d}"
    return {path.stem: load_file(path) for path in sorted(folder.glob("?.safetensors"))}


def equal(one: dict[str, dict[str, np.ndarray]], other: dict[str, dict[str, np.ndarray]]) -> bool:
    return all(np.array_equal(one[i][name], other[i][name]) for i in one for name in one[i])


OTHER_RECIPES = [pytest.param(name, marks=pytest.mark.long) for name in ("gspo", "grpo", "dr_grpo", "rloo")]


@pytest.mark.parametrize("recipe", ["dr_mas", *OTHER_RECIPES])
@pytest.mark.usefixtures("every_checkpoint")
def test_ties_change_nothing_and_the_run_goes_on_and_resumes(trainer: Trainer, recipe: str) -> None:
    """Tied, tied, then a signal, then ties again: momentum of the third step must not move the fourth."""
    rewards, settings = Rewards({2}), {"recipe": recipe, "plan": INDEPENDENT, "concurrency": 1}
    stopped = trainer(application(rewards), steps=1, roles=["rare"], **settings)
    assert stopped.versions == {} and stopped.left_out == {"no_signal": 6}
    assert stopped.stayed == {"first": {"no signal": 1}, "rare": {"no sample": 1}}
    assert "no update: nothing to learn from in this step: first (no signal), rare (no sample)" in trainer.said
    run = trainer.folder / "run"

    whole = trainer(application(Rewards({2})), steps=5, roles=["rare"], to="whole", **settings)
    assert whole.finished and whole.versions == {"first": 1, "rare": 1} and whole.stayed == {}
    lines = trainer.metrics("whole")
    assert [line["updated"] for line in lines] == [False, False, True, False, False]
    assert [line["rows"] for line in lines] == [0, 0, 8, 0, 0]
    assert [line["left_out"].get("no_signal", 0) for line in lines] == [6, 6, 0, 6, 6]
    assert [line["groups"] > 0 for line in lines] == [False, False, True, False, False]
    assert lines[3]["stayed"] == {"first": "no signal", "rare": "no sample"}
    assert (
        all(line["roles"]["first"]["entropy"] > 0 for line in lines) and "clip_share" not in lines[3]["roles"]["first"]
    )
    at = [trained(trainer.folder / "whole", step) for step in range(1, 6)]
    assert equal(at[0], at[1]) and not equal(at[1], at[2]) and equal(at[2], at[3]) and equal(at[3], at[4])
    assert load_checkpoint(run / "checkpoints")[0].versions == {}

    again = Rewards({1}, before=0)  # the third step of the run is the second after it goes on
    resumed = trainer.resume(application(again), steps=5)
    assert resumed.finished and resumed.versions == whole.versions
    assert [line["rows"] for line in trainer.metrics()] == [0, 0, 8, 0, 0]
    assert equal(trained(run, 5), at[4])


def test_a_rare_role_alone_without_a_call_is_no_reason_to_stop(trainer: Trainer) -> None:
    """The only trained role is not there in most steps."""
    policy = [
        {"name": "talker", "roles": ["rare"]},
        {"name": "base", "roles": ["first"], "kind": "frozen"},
    ]
    settings = {"policy": policy, "roles": ["rare"], "plan": INDEPENDENT, "concurrency": 1}
    summary = trainer(application(Rewards({2})), steps=4, **settings)
    assert summary.finished and summary.versions == {"talker": 1}
    assert [line["stayed"] for line in trainer.metrics()] == [{"talker": "no sample"}] * 2 + [
        {},
        {"talker": "no sample"},
    ]


def test_what_ties_beside_a_signal_is_counted_by_its_reason_and_not_passed_through_the_model(trainer, capsys):
    """Task b alone has outcomes that differ: of six episodes the two of a and c each have advantage 0."""
    outcomes = itertools.count()

    async def solve(task: dict[str, str]) -> float:
        await ask("first", f"say {task['letter']}")
        return float(task["letter"] == "b" and next(outcomes) % 2)

    summary = trainer(application(solve), plan=INDEPENDENT, concurrency=1, steps=1)
    (line,) = trainer.metrics()
    assert (line["rows"], line["groups"], line["candidates"]) == (2, 1, 6) and line["updated"]
    assert line["left_out"] == summary.left_out == {"zero_advantage": 4} and line["staleness"] == {"0": 2}
    assert line["roles"]["first"]["kept"] == line["policies"]["first"]["rows"] == 2
    assert "left out: zero_advantage 4" in trainer.said
    assert main(["show", str(trainer.folder / "run"), "--groups"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "2 of 6 candidates trained on; left out:" in shown
    assert "zero_advantage 4 66.7% its advantage is zero, so it teaches nothing" in shown
    run = OpenedRun(trainer.folder / "run", "run")
    by_task = {group.key["task"]: group.reason for group in step_groups(run, 0).groups}
    run.close()
    assert by_task == {"a": "zero_advantage", "b": "", "c": "zero_advantage"}


@pytest.mark.parametrize(
    ("settings", "versions"),
    [
        ({"loss": {"entropy": 0.01}}, {"first": 2}),
        ({"loss": {"kl": 0.1}}, {}),
    ],
)
def test_what_moves_a_policy_without_a_signal_is_a_real_update(trainer, settings, versions):
    """Entropy moves it from the first step; KL has no gradient while the policy is the reference."""
    summary = trainer(application(Rewards(set())), plan=INDEPENDENT, policies="full", **settings)
    assert summary.finished and summary.versions == versions
    for line in trainer.metrics():
        assert (line["rows"], line["left_out"]) == (6, {})
        assert line["updated"] == bool(versions)
        assert line["stayed"] == ({} if versions else {"first": "no gradient"})
