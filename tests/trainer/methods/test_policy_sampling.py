"""A K, a temperature and a choice among candidates of its own for each policy."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from cotune.config.train import TrainConfig
from cotune.errors import ConfigError
from cotune.records.structs import CallRecord
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.sqlite_store import SqliteStore
from cotune.trainer.config.load import convert
from cotune.trainer.config.resolve import resolve_plan
from cotune.trainer.evaluation.evaluate import evaluate
from cotune.trainer.run.engines import candidates_of_call
from tests.trainer.conftest import Trainer
from tests.trainer.tiny_app import TASKS, application, ask, converse, letters


def team(first: dict[str, Any], second: dict[str, Any]) -> list[dict[str, Any]]:
    """The policies of both roles of the tiny application."""
    return [{"name": "asker", "roles": ["first"], **first}, {"name": "writer", "roles": ["second"], **second}]


def configured(**settings: Any) -> TrainConfig:
    return convert({"model": "m", **settings})


def calls_by_role(run: Path, phase: str = "train") -> dict[str, list[CallRecord]]:
    found: defaultdict[str, list[CallRecord]] = defaultdict(list)
    with contextlib.closing(SqliteStore.open(run / "records.db")) as store:
        for episode in store.episodes(EpisodeFilters(phase=phase)):
            for call in store.calls(episode.id):
                found[call.role].append(call)
    return dict(found)


async def hot(task: dict[str, str]) -> dict[str, float]:
    """As `converse`, but the application asks for a temperature of its own."""
    heard = await ask("first", f"say {task['letter']}", temperature=0.3)
    return {"team": (await ask("second", f"after {heard}", temperature=0.3)).count(task["letter"]) / 4}


def test_each_policy_of_a_tree_has_its_own_k_temperature_and_choice(trainer: Trainer, tmp_path: Path) -> None:
    """The table of the policy wins over the run, and both over what the application asks for."""
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"id": "held", "letter": "d"}\n')
    policies = team({"k": 2, "temperature": 0.5, "select": "first"}, {"k": 5})
    trainer(
        application(hot, first=letters, second=letters),
        policy=policies,
        sampling={"temperature": 1.5},
        evaluation={"tasks": str(held_out), "every": 1},
        steps=1,
    )
    calls = calls_by_role(trainer.folder / "run")
    assert {len(call.candidates) for call in calls["first"]} == {2}
    assert {len(call.candidates) for call in calls["second"]} == {5}
    assert {call.chosen for call in calls["first"]} == {0}
    assert {(call.sampling or {})["temperature"] for call in calls["first"]} == {0.5}
    assert {(call.sampling or {})["temperature"] for call in calls["second"]} == {1.5}
    (line,) = trainer.metrics()
    assert line["candidates"] == 3 * 2 + 3 * 5
    assert line["path"] == "first of 2 or best of 5 by scorer"
    assert "plan tree (k=4; asker 2; writer 5)" in " ".join(trainer.said.split())

    # Evaluations sample as training does, the untrained model before the first step too.
    held = [calls_by_role(trainer.folder / "run", phase) for phase in evaluated_phases(trainer.folder / "run")]
    assert held
    for by_role in held:
        assert {(call.sampling or {})["temperature"] for call in by_role["first"]} == {0.5}
        assert {(call.sampling or {})["temperature"] for call in by_role["second"]} == {1.5}
        assert {len(call.candidates) for of_role in by_role.values() for call in of_role} == {1}


def shapes(calls: list[CallRecord]) -> set[tuple[float, int, float]]:
    """The top_p, top_k and min_p with which calls were sampled."""
    return {(call.sampling["top_p"], call.sampling["top_k"], call.sampling["min_p"]) for call in calls}


def greedy_words(run: Path, phase: str) -> list[str]:
    """The first role's answers to the held-out task."""
    return [call.candidates[0].text for call in calls_by_role(run, phase)["first"]]


async def narrow(task: dict[str, str]) -> dict[str, float]:
    """As `converse`, but the application asks for a cut of its own."""
    heard = await ask("first", f"say {task['letter']}", top_p=0.5)
    return {"team": (await ask("second", f"after {heard}", top_p=0.5)).count(task["letter"]) / 4}


def test_cuts_of_a_policy_hold_in_evaluations_alone(trainer: Trainer, tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"id": "held", "letter": "d"}\n')
    app = application(narrow, first=letters, second=letters)
    trainer(
        app,
        policy=team({"evaluation": {"top_k": 1}}, {"evaluation": {"top_p": 0.9, "min_p": 0.05}}),
        evaluation={"tasks": str(held_out), "every": 1},
        steps=1,
    )
    run = trainer.folder / "run"
    whole, first, second = {(1.0, 0, 0.0)}, {(1.0, 1, 0.0)}, {(0.9, 0, 0.05)}
    trained_on = calls_by_role(run)
    assert shapes(trained_on["first"]) == whole and shapes(trained_on["second"]) == whole
    phases = evaluated_phases(run)
    assert phases == ["eval"]
    held = calls_by_role(run, "eval")
    assert len(held["first"]) == 2, "before the first step, by the untrained model, and after it"
    assert shapes(held["first"]) == first and shapes(held["second"]) == second

    # cotune eval: each policy with its own settings, also where it plays the role of the other.
    options: dict[str, Any] = {"samples": 3, "seed": 1}
    report = evaluate(run, app, held_out, out=tmp_path / "numbers", **options)
    for mode in ("base", "trained"):
        by_role = calls_by_role(tmp_path / "numbers", f"eval-{mode}")
        assert shapes(by_role["first"]) == first and shapes(by_role["second"]) == second
        assert len(set(greedy_words(tmp_path / "numbers", f"eval-{mode}"))) == 1, "top_k = 1 leaves one answer"
    swapped = calls_by_role(tmp_path / "numbers", "eval-swapped")
    assert shapes(swapped["first"]) == second and shapes(swapped["second"]) == first
    assert (
        "The evaluation settings of [[policy]] tables hold in all modes except today: asker (top_k 1), writer "
        "(top_p 0.9, min_p 0.05)."
    ) in report.notes

    # As the application asks: its own cut.
    report = evaluate(run, app, held_out, out=tmp_path / "app", temperature="app", modes=("trained",))
    assert shapes(calls_by_role(tmp_path / "app", "eval-trained")["first"]) == {(0.5, 0, 0.0)}
    assert any(note.startswith("At --temperature app the evaluation settings") for note in report.notes)

    # Against a model: only the run's policies have their cuts, and the note says so.
    report = evaluate(run, app, held_out, out=tmp_path / "against", against=trainer.base, temperature=1.0)
    label, model = report.evaluations
    against = tmp_path / "against"
    assert shapes(calls_by_role(against, f"eval-{label}")["first"]) == first
    assert shapes(calls_by_role(against, f"eval-{model}")["first"]) == whole
    (note,) = [note for note in report.notes if note.startswith("The evaluation settings")]
    ending = f"The sides are not sampled alike: {label} has them for first, second; {model} has them for no role."
    assert note.endswith(ending)

    # A resumed run may not change them: its best checkpoint would compare two ways to sample.
    changed = team({"evaluation": {"top_k": 2}}, {"evaluation": {"top_p": 0.9, "min_p": 0.05}})
    with pytest.raises(ConfigError, match=r"policy = .* was .* when the run was started"):
        trainer.resume(app, policy=changed, steps=2)


def evaluated_phases(run: Path) -> list[str]:
    with contextlib.closing(SqliteStore.open(run / "records.db")) as store:
        return sorted({episode.phase for episode in store.episodes()} - {"train", "check"})


def test_each_fork_of_a_replay_has_the_branches_of_its_policy(trainer: Trainer) -> None:
    policies = team({"k": 2}, {"k": 3})
    trainer(application(converse), policy=policies, plan={"kind": "replay"}, steps=1)
    branches: defaultdict[tuple[str, str], int] = defaultdict(int)
    with contextlib.closing(SqliteStore.open(trainer.folder / "run" / "records.db")) as store:
        role_of = {}
        episodes = list(store.episodes(EpisodeFilters(phase="train")))
        for episode in episodes:
            for call in store.calls(episode.id):
                role_of[call.id] = call.role
        for episode in episodes:
            if episode.fork is not None:
                branches[episode.task.id, role_of[episode.fork.call]] += 1
        rollouts = sorted(episode.rollout for episode in episodes if episode.task.id == "a")
    assert branches == {(task["id"], role): k for task in TASKS for role, k in (("first", 2), ("second", 3))}
    assert rollouts == [0, 1, 2, 3, 4, 5], "each branch has a number of its own"
    (line,) = trainer.metrics()
    assert line["replay"]["branches"] == 3 * (2 + 3) and line["replay"]["forks"] == 6


def test_an_engine_makes_room_for_the_largest_k() -> None:
    assert candidates_of_call(configured(policy=team({"k": 2}, {"k": 9}))) == 9
    assert candidates_of_call(configured(policy=team({"k": 2}, {}))) == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"policy": team({"k": 1}, {})},
            r'policy.k = 1 of policy asker must be 2 or more: a group of one has nothing .* kind = "frozen"',
        ),
        ({"policy": team({"temperature": 0.0}, {})}, r"policy.temperature = 0.0 must be a number above 0"),
        ({"policy": team({"select": "best"}, {})}, r"policy\[0\].select = 'best' is not one of argmax, first, sample"),
        (
            {"policy": team({"kind": "provider", "k": 2}, {})},
            r"policy.k = 2 has no effect: the provider answers for policy asker",
        ),
        (
            {"policy": team({"top_p": 0.9}, {})},
            r"policy\[0\].top_p = 0.9 cannot be set for training: which tokens it cuts away depends on the weights "
            r"that are trained. Set it for evaluations, in a \[\[policy\]\] table: evaluation = { top_p = 0.9 }",
        ),
        ({"sampling": {"min_p": 0.1}}, r"sampling.min_p = 0.1 cannot be set for training: which tokens"),
        (
            {"policy": team({"evaluation": {"top_p": 0.0}}, {})},
            r"policy.evaluation.top_p = 0.0 must be a number above 0",
        ),
        ({"policy": team({"evaluation": {"min_p": 1.5}}, {})}, r"policy.evaluation.min_p = 1.5 must be at most 1"),
        ({"policy": team({"evaluation": {"top_k": -1}}, {})}, r"policy.evaluation.top_k = -1 must be 0 or more"),
        (
            {"policy": team({"kind": "provider", "evaluation": {"top_k": 5}}, {})},
            r"policy.evaluation = .*'top_k': 5.* has no effect: the provider answers for policy asker",
        ),
        (
            {"policy": team({"recipe": "distill", "teacher": "http://h:1", "temperature": 0.5}, {})},
            r"policy.temperature = 0.5 cannot be used with a teacher by its address",
        ),
        (
            {"recipe": "sft", "records": {"path": "r"}, "policy": team({"k": 2}, {})},
            r"policy.k = 2 cannot be used with recipe sft",
        ),
    ],
)
def test_what_a_policy_cannot_have_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configured(**settings)


@pytest.mark.parametrize(
    ("kind", "own", "message"),
    [
        ("independent", {"k": 2}, r"policy.k = 2 of policy asker cannot be used under the plan independent, which"),
        ("independent", {"select": "first"}, r"policy.select = 'first' of policy asker has no effect under the plan"),
        ("replay", {"select": "first"}, r"policy.select = 'first' of policy asker has no effect under the plan replay"),
    ],
)
def test_what_the_plan_has_no_use_for_is_refused(kind: str, own: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_plan(configured(policy=team(own, {}), plan={"kind": kind}), ["first", "second"])
