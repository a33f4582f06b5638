"""What a run samples, selects by and learns from, seen in its records and in what it says before its first step."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cotune.cli.main import main
from cotune.errors import ConfigError, GroupError
from cotune.records.ids import candidate_id
from cotune.records.structs import CallRecord
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.sqlite_store import SqliteStore
from tests.trainer.conftest import Trainer
from tests.trainer.tiny_app import TASKS, application, ask, letters


async def seeded(task: Any) -> dict[str, float]:
    """Sets a seed on every call, as an application that wants its tests to repeat does."""
    heard = await ask("first", f"say {task['letter']}", seed=42)
    await ask("first", f"say {task['letter']}", seed=42)
    said = await ask("second", f"after {heard}", seed=42)
    return {"solved": said.count(task["letter"]) / 4}


def both_ways(candidate: Any, call: Any, task: Any) -> dict[str, float]:
    """What is trained on, and ten times the opposite of it."""
    share = letters(candidate, call, task)
    return {"team": share, "against": -10.0 * share}


def calls_of(folder: Path, phase: str = "train") -> Iterator[tuple[CallRecord, list[dict[str, float]]]]:
    """The calls of a run with the rewards of their candidates."""
    with SqliteStore.open(folder, read_only=True) as store:
        for episode in store.episodes(EpisodeFilters(phase=phase)):
            for call in store.calls(episode.id):
                ids = [candidate_id(call.id, c.index) for c in call.candidates]
                rewards = store.rewards(ids)
                yield call, [dict(rewards.get(one) or {}) for one in ids]


@pytest.fixture(scope="module")
def seeded_tree(module_trainer: Trainer) -> tuple[str, list[tuple[CallRecord, list[dict[str, float]]]]]:
    """What a run said, and its calls."""
    app = application(seeded, first=both_ways)
    rewards = {"weights": {"team": 1.0}, "team_weight": 2.0}
    module_trainer(app, steps=2, to="seeded_tree", rewards=rewards, policies="full")
    return module_trainer.said, list(calls_of(module_trainer.folder / "seeded_tree"))


def test_the_candidate_that_goes_on_is_the_best_by_the_trained_reward(seeded_tree: Any) -> None:
    _, calls = seeded_tree
    scored = [(call, [r["team"] for r in rewards]) for call, rewards in calls if call.role == "first"]
    assert [rewards[call.chosen] for call, rewards in scored] == [max(rewards) for _, rewards in scored]
    assert any(max(rewards) > min(rewards) for _, rewards in scored)


def test_an_applications_seed_gives_every_call_of_a_tree_a_stream_of_its_own(seeded_tree: Any) -> None:
    _, calls = seeded_tree
    assert len(calls) == 2 * 3 * 3 and {call.params["seed"] for call, _ in calls} == {42}
    assert len({call.sampling["seed"] for call, _ in calls}) == len(calls)
    said = {tuple(c.token_ids for c in call.candidates) for call, _ in calls if call.role == "first"}
    assert len(said) == 2 * 3 * 2


def test_what_each_role_learns_from_is_said_before_the_first_step(seeded_tree: Any) -> None:
    said, _ = seeded_tree
    lines = said.splitlines()
    before = lines[: next(i for i, line in enumerate(lines) if line.startswith("step 1/"))]
    assert "first learns from 2 x team (its scorer); weight 0: against" in before
    assert (
        "the workflow's own reward (solved) is shown and trains no role: under the plan tree the candidates of one "
        "call are compared by their role's scorer, and share one outcome. Return it from a scorer as `team` to train "
        "on it, or use --plan independent."
    ) in before


def test_an_applications_seed_leaves_the_episodes_of_a_task_different(trainer: Trainer) -> None:
    trainer(application(seeded), steps=1, tasks=TASKS[:1], tasks_per_step=1, recipe="dapo")
    calls = [call for call, _ in calls_of(trainer.folder / "run")]
    assert len(calls) == 4 * 3
    first = [call.candidates[0].token_ids for call in calls if call.role == "first" and call.turn == 0]
    assert len(set(first)) == 4
    assert "first learns from solved (the episode's outcome)" in trainer.said.splitlines()


async def sometimes(task: Any) -> dict[str, float]:
    """Fails on c; b loses two points."""
    await ask("first", f"say {task['letter']}")
    if task["id"] == "c":
        raise ValueError("no rhyme")
    return {
        "team": {"a": 1.0, "b": -2.0}.get(task["id"], 0.0),
        "success": task["id"] != "b",
    }


def test_figures_of_a_step_are_named_for_what_they_are_and_failed_episodes_count(trainer: Trainer) -> None:
    held_out = trainer.folder / "held_out.jsonl"
    held_out.write_text(
        "".join(json.dumps({**task, "more": task["id"] != "a"}) + "\n" for task in [*TASKS, {"id": "d", "letter": "d"}])
    )
    trainer(application(sometimes, first=letters), steps=3, evaluation={"tasks": str(held_out), "every": 2})
    lines = trainer.metrics()
    for line in lines:
        # of a, b and c: 1, -2 and as the lowest; true, false and failed
        assert line["outcome"]["team"] == pytest.approx((1.0 - 2.0 - 2.0) / 3)
        assert line["outcome"]["success"] == pytest.approx(1 / 3)
        assert line["candidate_reward"] == pytest.approx(line["roles"]["first"]["reward"])
    assert [line["held_out"].get("success") for line in lines] == [None, 0.5, 0.5]
    assert (lines[1]["held_out"]["episodes"], lines[1]["held_out"]["failed"]) == (4, 1)
    said = [line for line in trainer.said.splitlines() if line.startswith("step ")]
    assert re.search(r"all candidates: first 0\.\d+  \|  best of 4 by scorer: success 0\.333  team -1\.000", said[0])
    assert "held-out" not in said[0]
    assert "held-out, single samples: success 0.500 [0.150, 0.850] on 4" in said[1] and "trained on) -0.750" in said[1]
    assert "(1 of 4 failed)" in said[1]
    evaluated = [call for call, _ in calls_of(trainer.folder / "run", "eval")]
    assert len(evaluated) == 3 * 4 and {len(call.candidates) for call in evaluated} == {1}


def test_held_out_tasks_that_are_trained_on_are_said(trainer: Trainer) -> None:
    held_out = trainer.folder / "held_out.jsonl"
    held_out.write_text("".join(json.dumps(task) + "\n" for task in [*TASKS, {"id": "d", "letter": "d"}]))
    trainer(application(first=letters), steps=1, evaluation={"tasks": str(held_out)})
    assert "3 of 4 held-out tasks are trained on too: success on them says little" in trainer.said.splitlines()
    with pytest.raises(ConfigError, match=r"evaluation\.tasks"):
        trainer(application(first=letters), to="other", evaluation={"tasks": "nowhere.jsonl"})


def test_a_method_that_takes_outcomes_is_refused_under_a_tree(trainer: Trainer) -> None:
    (trainer.folder / "outcomes.py").write_text(OUTCOMES)
    with pytest.raises(ConfigError, match="takes the outcome of the episode: all candidates of a call") as caught:
        trainer(application(first=letters), recipe=f"{trainer.folder}/outcomes.py:Outcomes", plan={"kind": "tree"})
    assert caught.value.remedy == "Return the team reward from a scorer as `team`, or use --plan independent."
    assert not (trainer.folder / "run").exists()


OUTCOMES = """
from cotune.methods import AtGrpo, Attribution

class Outcomes(AtGrpo):
    attribution = Attribution(outcome=True)
"""


def test_check_says_what_is_learned_from_and_what_becomes_of_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    tasks, report = tmp_path / "tasks.jsonl", tmp_path / "report.json"
    tasks.write_text(json.dumps(TASKS[0]) + "\n")
    words = ["check", f"{__name__}:SEEDED", "--tasks", str(tasks), "--json", str(report)]
    assert main([*words, "--set", "rewards.weights={team=0.5}"]) == 0
    found = {(f["level"], f["about"], f["text"]) for f in json.loads(report.read_text())["findings"]}
    assert ("note", "rewards", "first learns from 0.5 x team (its scorer); weight 0: against") in found
    seeds = "asks for seed 42; training and evaluation mix it into a seed of each call's own."
    assert ("note", "first", seeds) in found and ("note", "second", seeds) in found
    assert any(level == "warns" and about == "rewards" and "trains no role" in text for level, about, text in found)


SEEDED = application(seeded, first=both_ways)


def test_outcomes_that_nobody_knows_yet_stop_no_run_and_are_left_out(trainer: Trainer) -> None:
    """As ratings that come for some episodes only: not for the ones looked at first, and not for one task."""
    ran = []

    async def rated(task: Any) -> dict[str, float | None]:
        ran.append(task["letter"])
        said = await ask("first", f"say {task['letter']}")
        return {"rating": None if len(ran) <= 3 or task["letter"] == "a" else said.count(task["letter"]) / 4}

    summary = trainer(application(rated), steps=1, plan={"kind": "independent"})
    assert "the outcome (rating) of all 3 episodes is unknown" in trainer.said
    assert "first learns from rating (the episode's outcome)" in trainer.said
    assert summary.finished and summary.left_out["missing_reward"] == 4 and len(ran) == 3 + 3 * 4


async def unrated(task: Any) -> dict[str, None]:
    await ask("first", f"say {task['letter']}")
    return {"team": None}


MISSED = "No episode of this step has an outcome, so nothing is learned from outcomes."


def test_a_step_in_which_nobody_knows_an_outcome_stops_the_run_and_is_tried_again(trainer: Trainer) -> None:
    with pytest.raises(GroupError, match=r"Step 1 has no usable sample \(missing_reward: 12\)\.") as caught:
        trainer(application(unrated), steps=1, plan={"kind": "independent"})
    assert caught.value.cause.endswith(MISSED)
    assert caught.value.remedy.startswith("Have solve return a number where it returns None, or add @solve.judge")

    async def rated(task: Any) -> dict[str, float]:
        return {"team": (await ask("first", f"say {task['letter']}")).count(task["letter"]) / 4}

    summary = trainer.resume(application(rated))
    assert "12 episodes of step 1 lack records or rewards: they are run again" in trainer.said
    assert summary.finished and summary.versions == {"first": 1}


def test_outcomes_that_nobody_knows_are_said_where_scorers_give_what_is_learned(trainer: Trainer) -> None:
    plan = {"kind": "independent"}
    summary = trainer(application(unrated, first=letters), steps=2, recipe="at_grpo", plan=plan)
    assert summary.finished and summary.versions == {"first": 2}
    assert trainer.said.count(MISSED) == 1
    for line in map(json.loads, (trainer.folder / "run" / "metrics.jsonl").read_text().splitlines()):
        assert line["unknown"] == line["episodes"] == 12
        assert sum(note.startswith(MISSED) for note in line["notes"]) == 1


def test_outcomes_that_train_nobody_are_not_missed(trainer: Trainer) -> None:
    trainer(application(unrated, first=letters), steps=1)
    assert MISSED not in trainer.said
