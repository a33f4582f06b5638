"""The guard notices that training has collapsed, warns or ends the run, and names the way back to the best steps."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from cotune.cli.main import main
from cotune.config.rollouts import CurriculumConfig
from cotune.episodes.workflows import WorkflowFunction
from cotune.errors import ConfigError
from cotune.reading.facts import ending, find_troubles
from cotune.reading.run import OpenedRun
from cotune.records.structs import Task
from cotune.storage.checkpoints import newest_checkpoint
from cotune.trainer.config.load import load_config
from cotune.trainer.guard import best_window, find_collapse, of_one_level
from cotune.trainer.schedules.curriculum import schedule_of
from tests.trainer.conftest import Trainer
from tests.trainer.tiny_app import application, ask

EPISODES = 6
"""Episodes of a step under `SETTINGS`: three tasks, twice each."""
SETTINGS = {"plan": {"kind": "independent", "k": 2}, "policies": "full", "concurrency": 1, "steps": 12}
COLLAPSING = [0.9, *[1.0] * 5, *[0.0] * 6]
"""Rewards of steps. The best window ends after step 6; the mean of steps 6 to 10 is 0.2."""
REASON = "the reward of role first fell from 1.000 to 0.200 (means over 5 steps)"


def steps(**rewards: list[float]) -> list[Mapping[str, Any]]:
    """Metrics of steps with these trained rewards by role."""
    count = len(next(iter(rewards.values())))
    roles = [{role: {"reward": of[i]} for role, of in rewards.items()} for i in range(count)]
    return [{"step": i, "outcome": {}, "roles": own} for i, own in enumerate(roles)]


def scripted(rewards: list[float]) -> WorkflowFunction:
    """An application whose episodes of a step all end with the reward of that step."""
    episodes_run = -3  # the first looks at the application come before the first step

    async def solve(task: Any) -> float:
        nonlocal episodes_run
        step = max(episodes_run // EPISODES, 0)
        episodes_run += 1
        await ask("first", f"say {task['letter']}")
        return rewards[step]

    return application(solve)


@pytest.mark.parametrize(
    ("rewards", "how"),
    [
        ([0.5] * 20, None),
        ([1.0] * 5 + [0.0] * 4, None),  # fewer steps than two windows
        ([1.0] * 6 + [0.0] * 4, "fell from 1.000 to 0.200"),
        # From 0.2 to 0.8: a mean of 0.5 has lost half of the gain, which is not more than half.
        ([0.2] * 5 + [0.8] * 10 + [0.5] * 5, None),
        ([0.2] * 5 + [0.8] * 10 + [0.4] * 5, "fell from 0.800 to 0.400"),
        # Nothing was gained: half of half the best is 0.225.
        ([0.9] * 10 + [0.7] * 5, None),
        ([0.9] * 10 + [0.6] * 5, "fell from 0.900 to 0.600"),
        # A fall within the noise of the steps, of which five happen to be good.
        ([1.0, 0.0] * 5 + [1.0] * 5 + [0.0, 1.0, 0.0, 0.0, 0.0], None),
    ],
)
def test_a_reward_that_collapses(rewards: list[float], how: str | None) -> None:
    expected = how and f"the reward of role a {how} (means over 5 steps)"
    assert find_collapse(steps(a=rewards)) == expected


def test_rewards_that_only_waver_are_no_collapse() -> None:
    """100 runs of 100 steps: at four standard errors in place of five, eight of them get a warning."""
    alarms = 0
    for seed in range(100):
        lines = steps(a=list(0.1 * np.random.default_rng(seed).standard_normal(100)))
        alarms += any(find_collapse(lines[:count]) is not None for count in range(10, 101))
    assert alarms <= 3


def test_sampler_and_learner_that_disagree() -> None:
    lines = [{"step": i, "roles": {"a": {"sampler_gap_mean": gap}}} for i, gap in enumerate([0.01] * 5 + [0.4] * 4)]
    assert find_collapse(lines[:7]) is None
    assert find_collapse(lines[:9]) == "sampler and learner disagree on role a by 0.32 nats a token, above 0.25"


def test_the_end_of_the_best_window() -> None:
    assert best_window(steps(a=COLLAPSING)) == 6
    assert best_window(steps(a=[0.0] * 4)) is None


def test_each_role_is_watched_and_opponents_together() -> None:
    won, lost = [-1.0] * 6 + [0.0] * 4, [1.0] * 6 + [0.0] * 4
    assert find_collapse(steps(white=lost, black=won)) == (
        "the reward of role white fell from 1.000 to 0.200 (means over 5 steps)"
    )
    assert find_collapse(steps(white=lost, black=won), "together") is None, "black wins what white loses"
    assert find_collapse(steps(white=lost, black=lost), "together") == (
        "the mean reward of all roles fell from 1.000 to 0.200 (means over 5 steps)"
    )
    assert find_collapse(steps(white=lost), "none") is None
    assert find_collapse(steps(white=lost), "each", {"white"}) is None


def test_a_role_that_is_not_trained_in_each_step_is_compared_with_its_own_steps() -> None:
    lines = steps(white=[1.0] * 24, black=[0.1] * 24)
    turns = [
        {**line, "roles": {role: line["roles"][role]}}
        for line, role in zip(lines, ["white", "black"] * 12, strict=True)
    ]
    assert find_collapse(turns) is None
    assert best_window(turns) == 5


def test_a_harder_level_is_no_collapse() -> None:
    tasks = [Task(id=f"{level}-{i}", input={"level": level}) for level in (1, 2) for i in range(2)]
    schedule = schedule_of(tasks, CurriculumConfig(pool="by:level"), 18, 0, [(0, 2)])
    lines = steps(a=[0.9] * 6 + [0.1] * 6 + [0.05] * 2)
    assert find_collapse(lines) is not None
    for count in range(1, len(lines) + 1):
        assert find_collapse(of_one_level(lines[:count], schedule.level)) is None
    assert [line["step"] for line in of_one_level(lines, schedule.level)] == [12, 13], "the last level has all tasks"


def test_a_run_that_gets_better_goes_on_although_what_it_returns_falls(trainer: Trainer) -> None:
    """The answers get shorter, as the weight asks: the component falls, and the trained reward rises."""
    tokens = [8.0] * 6 + [1.0] * 6
    rewards = {"weights": {"team": -0.125}}
    summary = trainer(scripted(tokens), guard="stop", rewards=rewards, **SETTINGS)
    assert (summary.steps, summary.ended) == (12, "")
    lines = trainer.metrics()
    assert [line["roles"]["first"]["reward"] for line in lines] == [-1.0] * 6 + [-0.125] * 6
    assert best_window(lines) == 11


def test_a_run_that_collapses_ends_and_names_the_commands_that_go_back(
    trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = trainer(scripted(COLLAPSING), guard="stop", **SETTINGS)
    run = trainer.folder / "run"
    assert (summary.steps, summary.finished) == (10, True)
    assert summary.ended == f"the guard: {REASON}"
    assert newest_checkpoint(run / "checkpoints") == run / "checkpoints" / "step-000010"
    said = " ".join(trainer.said.split())
    assert f"ended after step 10: the guard: {REASON}" in said
    with OpenedRun(run) as opened:
        end = ending(opened)
    assert end is not None and end.remedy in said
    export, train = re.findall(r"cotune (?:export|train) [^;]*", end.remedy)

    # The two commands lead to a new run that starts with the weights of the best steps.
    assert shlex.split(export) == ["cotune", "export", str(run), "--step", "6", "--out", "good"]
    assert train == "cotune train app:solve --init good"
    good = trainer.folder / "good"
    assert main([*shlex.split(export)[1:-1], str(good)]) == 0
    assert "this is step 6; the newest checkpoint is step 10" in " ".join(capsys.readouterr().out.split())
    trainer(scripted([1.0]), to="second", init=str(good), **SETTINGS | {"steps": 1})
    weights = [load_file(path / "0.safetensors") for path in (first_checkpoint(trainer), best_checkpoint(run))]
    assert all(np.array_equal(weights[0][name], weights[1][name]) for name in weights[1])

    # Resumed without the guard, the run goes on from its newest checkpoint.
    again = trainer.resume(scripted([0.0] * 3), guard="off", steps=11)
    assert (again.steps, again.ended) == (11, "")


def first_checkpoint(trainer: Trainer) -> Path:
    return trainer.folder / "second" / "checkpoints" / "step-000000"


def best_checkpoint(run: Path) -> Path:
    return run / "checkpoints" / "step-000006"


def test_by_default_a_run_that_collapses_goes_on_with_one_warning(trainer: Trainer) -> None:
    summary = trainer(scripted(COLLAPSING), checkpoint_every=4, **SETTINGS)
    assert (summary.steps, summary.ended) == (12, "")
    said = " ".join(trainer.said.split())
    assert said.count("The guard: ") == 1
    assert f"The guard: {REASON}. step-000004 is the checkpoint of the run's best 5 steps" in said
    kept = sorted(path.name for path in (trainer.folder / "run" / "checkpoints").glob("step-*"))
    assert kept == ["step-000004", "step-000008", "step-000012"]
    noted = [line["step"] for line in trainer.metrics() if any("The guard" in note for note in line["notes"])]
    assert noted == [9, 10, 11], "each step of the collapse has the note"
    with OpenedRun(trainer.folder / "run") as opened:
        assert [one.text for one in find_troubles(opened) if "The guard" in one.text] != []


def test_a_guard_that_is_off_keeps_nothing(trainer: Trainer) -> None:
    summary = trainer(scripted(COLLAPSING), guard="off", **SETTINGS)
    assert summary.steps == 12 and "guard" not in trainer.said
    kept = sorted(path.name for path in (trainer.folder / "run" / "checkpoints").glob("step-*"))
    assert kept == ["step-000011", "step-000012"]


@pytest.mark.parametrize("field", ["guard.action", "guard.window", "guard.min_entropy", "guard.max_gap"])
def test_the_former_table_of_the_guard_names_what_replaces_it(field: str, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(f'model = "m"\n[guard]\n{field.partition(".")[2]} = 3')
    with pytest.raises(ConfigError, match="was removed from the configuration") as by_file:
        load_config(config, {})
    with pytest.raises(ConfigError, match="was removed from the configuration"):
        load_config(None, {"model": "m", "guard": "stop", field: 3})
    assert by_file.value.field == field


def test_a_step_without_a_checkpoint_is_refused(trainer: Trainer, tmp_path: Path) -> None:
    trainer(scripted([0.0, 0.0]), **SETTINGS | {"steps": 2})
    run = trainer.folder / "run"
    assert json.loads((run / "run.json").read_text())["config"]["guard"] == "warn"
    with pytest.raises(ConfigError, match=r"step = 7 is no checkpoint of .*These are kept: 1, 2\."):
        from cotune.adapters.export import export_run

        export_run(run, tmp_path / "out", step=7)
