"""The replay plan end to end: forks, branches with outcomes of their own, groups of one prompt, and resuming."""

from __future__ import annotations

import datetime
import os
import random
import signal
import time
import uuid
from collections import Counter
from typing import Any

import pytest

from cotune.algorithms.catalogue import recipe
from cotune.algorithms.collect import collect
from cotune.algorithms.prepare import prepare
from cotune.errors import ConfigError
from cotune.reading.groups import step_groups
from cotune.reading.run import OpenedRun
from cotune.records.structs import CallRecord, Episode
from cotune.replay.forks import Place
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.sqlite_store import SqliteStore
from cotune.trainer import step as step_module
from cotune.trainer.rollout import forks as forks_module
from cotune.trainer.rollout.forks import effects_before
from cotune.trainer.run.run import RolloutRun
from tests.trainer.conftest import Trainer
from tests.trainer.tiny_app import application, ask

SETTINGS: dict[str, Any] = {"policies": "shared", "plan": {"kind": "replay", "k": 3}}


async def relay(task: dict[str, str]) -> dict[str, float]:
    """Three calls, each on what the one before said; the outcome counts the letters a to h of all."""
    said = ""
    for role in ("first", "second", "third"):
        said += await ask(role, f"say {task['letter']} {said}")
    return {"team": sum(letter in "abcdefgh" for letter in said) / 12}


class Records:
    """What a run has recorded of its steps."""

    def __init__(self, trainer: Trainer, run: str = "run") -> None:
        self.store = SqliteStore.open(trainer.folder / run / "records.db", read_only=True)
        self.episodes = list(self.store.episodes(EpisodeFilters(phase="train")))
        self.calls: dict[str, list[CallRecord]] = {e.id: self.store.calls(e.id) for e in self.episodes}

    def of(self, step: int) -> tuple[list[Episode], list[Episode]]:
        """Trunks and branches of a step."""
        found = [e for e in self.episodes if e.training_step == step]
        return [e for e in found if e.fork is None], [e for e in found if e.fork is not None]


@pytest.fixture(scope="module")
def ran(module_trainer: Trainer) -> tuple[Trainer, Records]:
    module_trainer(application(relay), steps=2, replay={"budget": 2}, to="ran", **SETTINGS)
    return module_trainer, Records(module_trainer, "ran")


def test_every_fork_has_k_candidates_of_one_prompt_and_outcomes_of_their_own(ran: tuple[Trainer, Records]):
    _, records = ran
    for step in (0, 1):
        trunks, branches = records.of(step)
        assert (len(trunks), len(branches)) == (3, 3 * 2 * 3)
        forks = Counter(e.fork.call for e in branches)
        assert set(forks.values()) == {3} and len(forks) == 6
        by_id = {call.id: call for e in (*trunks, *branches) for call in records.calls[e.id]}
        for branch in branches:
            fork, at = by_id[branch.fork.call], by_id[branch.fork.at]
            assert (at.prompt, at.role, at.messages) == (fork.prompt, fork.role, fork.messages)
            before = [c for c in records.calls[branch.id] if c.step < at.step]
            assert len(before) == fork.step and all(c.replayed for c in before)
            assert all(c.replayed is None and c.policy == fork.policy for c in records.calls[branch.id][fork.step :])
            said = "".join(c.candidates[0].text for c in records.calls[branch.id])
            team = sum(letter in "abcdefgh" for letter in said) / 12
            assert records.store.rewards([branch.id])[branch.id] == {"team": pytest.approx(team)}


def test_the_groups_are_the_forks_and_are_trained_once(ran: tuple[Trainer, Records]):
    trainer, records = ran
    consumed = records.store.consumed()
    lines = trainer.metrics("ran")
    assert set(consumed) <= {e.fork.call for e in records.episodes if e.fork}
    assert Counter(consumed.values()) == {line["step"]: line["groups"] for line in lines if line["groups"]}
    for line in lines:
        left, figures = line["left_out"], line["replay"]
        silent = ("zero_variance", "zero_advantage", "continuation", "no_signal")
        kept = line["rows"] + sum(left.get(name, 0) for name in silent)
        assert kept == figures["sampled"]
        trunks, branches = records.of(line["step"])
        asked = sum(len(records.calls[e.id]) for e in trunks)
        branch_calls = [c for e in branches for c in records.calls[e.id]]
        assert figures == {
            "forks": 6, "unrepeatable": 0, "branches": 18, "diverged": 0,
            "budget": figures["sampled"], "sampled": sum(c.replayed is None for c in branch_calls),
            "repeated": sum(c.replayed is not None for c in branch_calls),
        }  # fmt: skip
        assert left["trunk"] == asked and "not_forked" not in left
        assert line["outcome"]["team"] == pytest.approx(
            sum(records.store.rewards([e.id])[e.id]["team"] for e in trunks) / 3
        )


def test_what_is_shown_of_a_step_is_what_it_was_trained_on(ran: tuple[Trainer, Records]):
    trainer, _ = ran
    opened = OpenedRun(trainer.folder / "ran", "ran")
    for line in trainer.metrics("ran"):
        shown = step_groups(opened, line["step"])
        trained = sum(map(bool, shown.advantages.values()))
        assert trained == line["rows"] > sum(len(group.samples) for group in shown.groups)
        assert {k: n for k, n in shown.left_out.items() if n} == {k: n for k, n in line["left_out"].items() if n}
    opened.close()


def test_recipe_c3_trains_on_the_candidates_of_forks_alone(trainer: Trainer):
    trainer(application(relay), steps=1, recipe="c3", replay={"budget": 2}, **SETTINGS)
    (line,) = trainer.metrics()
    _, branches = Records(trainer).of(0)
    calls = Records(trainer).calls
    sampled = [call for episode in branches for call in calls[episode.id] if call.replayed is None]
    forks = 6 * 3
    assert line["left_out"]["not_forked"] == len(sampled) - forks > 0
    silent = sum(line["left_out"].get(name, 0) for name in ("zero_variance", "zero_advantage", "no_signal"))
    assert line["rows"] == forks - silent


def test_forks_by_entropy(trainer: Trainer):
    """One fork in each of three episodes, with two branches."""
    plan = {"kind": "replay", "k": 2}
    trainer(application(relay), steps=1, policies="shared", plan=plan, replay={"forks": "entropy:1"})
    records = Records(trainer)
    trunks, branches = records.of(0)
    (line,) = trainer.metrics()
    assert (len(trunks), len(branches)) == (3, 6) and line["left_out"]["trunk"] == 9
    assert line["replay"]["forks"] == 3 and line["replay"]["branches"] == 6
    assert all(role["samples"] for role in line["roles"].values())


async def second_alone(task: dict[str, str]) -> dict[str, float]:
    """Three calls; the outcome counts the letters a to h of the second one alone."""
    await ask("first", f"say {task['letter']}")
    said = await ask("second", f"say {task['letter']} again")
    await ask("third", f"say {said}")
    return {"team": sum(letter in "abcdefgh" for letter in said) / 4}


def test_forks_are_made_where_the_last_steps_found_an_effect(trainer: Trainer, monkeypatch: pytest.MonkeyPatch):
    read_for: list[int] = []

    def counted(run: RolloutRun, step: int) -> dict[Place, float]:
        read_for.append(step)
        return effects_before(run, step)

    for module in (step_module, forks_module):
        monkeypatch.setattr(module, "effects_before", counted)
    trainer(application(second_alone), steps=5, replay={"forks": "decisive", "budget": 1}, **SETTINGS)
    # The branches of earlier steps are read once for each step.
    assert read_for == [0, 1, 2, 3, 4]
    assert [line["replay"]["forks"] for line in trainer.metrics()] == [3] * 5
    records = Records(trainer)
    role_of = {call.id: call.role for calls in records.calls.values() for call in calls}
    forked = [{role_of[branch.fork.call] for branch in records.of(step)[1]} for step in range(5)]
    # Each place is tried once. Nothing that the third role says changes the outcome.
    assert forked[:3] == [{"first"}, {"second"}, {"third"}]
    assert forked[3] <= {"first", "second"} and forked[4] <= {"first", "second"}


async def opposed(task: dict[str, str]) -> dict[str, float]:
    """As `second_alone`, but the plain sum of the components is always 0."""
    team = (await second_alone(task))["team"]
    return {"team": team, "opponent": -team}


def test_an_effect_is_one_on_the_weighted_outcome(trainer: Trainer):
    rewards = {"weights": {"team": 1.0, "opponent": 0.0}}
    trainer(application(opposed), steps=2, replay={"forks": "decisive", "budget": 3}, rewards=rewards, **SETTINGS)
    records = Records(trainer)
    role_of = {call.id: call.role for calls in records.calls.values() for call in calls}
    assert {role_of[branch.fork.call] for branch in records.of(0)[1]} == {"first", "second", "third"}
    second_step = {role_of[branch.fork.call] for branch in records.of(1)[1]}
    assert second_step and second_step <= {"first", "second"}
    assert "no place of an episode had an effect" not in " ".join(trainer.said.split())


async def always_equal(task: dict[str, str]) -> dict[str, float]:
    """Two calls, on which the outcome does not depend."""
    await ask("first", f"say {task['letter']}")
    await ask("second", f"say {task['letter']} again")
    return {"team": 1.0}


def test_forks_that_are_drawn_without_an_effect_are_said_once(trainer: Trainer):
    trainer(application(always_equal), steps=3, replay={"forks": "decisive", "budget": 2}, **SETTINGS)
    assert " ".join(trainer.said.split()).count("no place of an episode had an effect on the outcome") == 1


def test_the_budget_is_told_before_the_first_step(ran: tuple[Trainer, Records]):
    said = " ".join(ran[0].said.split())
    assert "plan replay (k=3), recipe c3_branches" in said
    # 3 calls, of which 2 are forked, each three times: 3 (3 - s) calls for a fork at step s
    assert "replay: an episode of 3.0 calls is forked at 2.0 of them, which makes 6.0 branches: about" in said
    assert said.index("replay: an episode of") < said.index("step 1/2")
    assert "6 forks, 18 branches, 0 diverged" in said


def test_a_killed_run_loses_no_branch_and_trains_no_group_twice(trainer: Trainer):
    left = [16]

    async def stopped(task: dict[str, str]) -> dict[str, float]:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return await relay(task)

    first = trainer(application(stopped), steps=2, concurrency=2, **SETTINGS)
    assert not first.finished
    before = {e.id for e in Records(trainer).episodes if e.status == "ok"}
    assert len(before) > 3 and left[0] <= 0
    assert trainer.resume(application(relay)).finished
    records = Records(trainer)
    kept = [e for e in records.episodes if e.status == "ok"]
    assert before <= {e.id for e in kept}
    for step in (0, 1):
        trunks, branches = records.of(step)
        good = [e for e in branches if e.status == "ok"]
        assert len([e for e in trunks if e.status == "ok"]) == 3 and len(good) == 3 * 3 * 3
        assert len({(e.task.id, e.rollout) for e in good}) == len(good)
    lines = trainer.metrics()
    assert Counter(records.store.consumed().values()) == {n["step"]: n["groups"] for n in lines if n["groups"]}


def test_an_application_that_is_not_repeatable_is_counted_and_shown(trainer: Trainer):
    count = [0]

    async def counting(task: dict[str, str]) -> dict[str, float]:
        count[0] += 1
        said = await ask("first", f"say {task['letter']}")
        number = count[0] % 7 if task["letter"] == "a" else 0
        said += await ask("second", f"number {'x' * number} {said}")
        return {"team": sum(letter in "abcdefgh" for letter in said) / 8}

    trainer(application(counting), steps=1, replay={"forks": "role:second"}, **SETTINGS)
    (line,) = trainer.metrics()
    assert line["replay"]["branches"] == 9 and line["replay"]["diverged"] in (1, 2, 3)
    assert line["left_out"]["diverged"] == line["replay"]["diverged"] and line["failed"] == 0
    said = " ".join(trainer.said.split())
    assert "Turn 0 of role 'second' differs from the record in message 1 (user), character" in said


def test_a_frozen_run_repeats_prompts_with_a_date_and_an_id(trainer: Trainer):
    async def dated(task: dict[str, str]) -> dict[str, float]:
        said = await ask("first", f"{datetime.datetime.now()} {uuid.uuid4()} say {task['letter']}")
        said += await ask("second", f"{time.time()} {random.random()} {said}")
        return {"team": sum(letter in "abcdefgh" for letter in said) / 8}

    trainer(application(dated), steps=1, replay={"tools": "frozen"}, **SETTINGS)
    (line,) = trainer.metrics()
    assert line["replay"]["branches"] == 18 and line["replay"]["diverged"] == 0


def test_steps_ahead_fork_all_roles_under_swapped_policies(trainer: Trainer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cotune.records.policies.STEPS_BETWEEN_SWAPS", 1)
    routing = {"swap": ["first", "second"]}
    settings = {**SETTINGS, "policies": "lora", "routing": routing, "mode": "async"}
    trainer(application(relay), steps=3, **settings)
    records = Records(trainer)
    for step, line in enumerate(trainer.metrics()):
        trunks, branches = records.of(step)
        by_id = {call.id: call for trunk in trunks for call in records.calls[trunk.id]}
        forked = {by_id[branch.fork.call].role for branch in branches}
        assert forked == {"first", "second", "third"}
        assert line["replay"]["branches"] == len(branches) == 3 * 3 * len(forked)
        assert "untrained_role" not in line["left_out"]


async def game(task: dict[str, str]) -> float:
    """Two moves, each good where its answer begins with one of the letters a to p: the first is worth 1, the second
    0.3, whatever the other is."""
    moves = [await ask(role, f"{role} {task['letter']}") for role in ("first", "second")]
    good = [move[:1] in tuple("abcdefghijklmnop") for move in moves]
    return 1.0 * good[0] + 0.3 * good[1]


def wrong_signs(trainer: Trainer, kind: str) -> tuple[int, int]:
    """Trained moves of the second role, and how many of them have an advantage of the wrong sign."""
    settings = {**SETTINGS, "plan": {"kind": kind, "k": 4}}
    trainer(
        application(game), [{"id": x, "letter": x} for x in "abcdefgh"], to=kind, steps=1, tasks_per_step=8, **settings
    )
    store = SqliteStore.open(trainer.folder / kind / "records.db", read_only=True)
    chosen = recipe("c3" if kind == "replay" else "dr_mas")
    collected = collect(store, store.episodes(EpisodeFilters(phase="train")), plan=chosen.plan)
    prepared = prepare(collected.samples, chosen)
    total = wrong = 0
    for sample, advantage in zip(prepared.samples, prepared.advantages.tolist(), strict=True):
        if sample.role == "second" and advantage:
            text = collected.calls[sample.call].candidates[0].text
            total += 1
            wrong += (advantage > 0) != (text[:1] in tuple("abcdefghijklmnop"))
    return total, wrong


def test_the_best_move_is_told_from_others_where_the_shared_outcome_hides_it(trainer: Trainer):
    total, wrong = wrong_signs(trainer, "replay")
    assert total >= 16 and wrong == 0
    total, wrong = wrong_signs(trainer, "independent")
    assert total >= 16 and wrong / total > 0.1


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"replay": {"forks": "best:2"}}, "replay.forks = 'best:2' is not one of all, decisive, first:N"),
        ({"replay": {"forks": "first:0"}}, "replay.forks = 'first:0'"),
        ({"replay": {"forks": "role:nobody"}}, "replay.forks = 'role:nobody'"),
        ({"replay": {"budget": 0}}, "replay.budget = 0 must be 1 or more"),
        ({"recipe": "dr_mas"}, "plan = 'replay' cannot be used with dr_mas"),
        ({"recipe": "c3", "plan": {"kind": "independent"}}, "plan.kind = 'independent' cannot be used with recipe c3"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_training(trainer: Trainer, settings: Any, text: str):
    with pytest.raises(ConfigError) as raised:
        trainer(application(relay), **{**SETTINGS, **settings})
    assert text in str(raised.value)


@pytest.mark.parametrize("asked", [{"temperature": 0}, {"temperature": 0.2, "seed": 7}])
def test_siblings_differ_whatever_temperature_and_seed_the_application_sets(trainer: Trainer, asked: dict[str, Any]):
    async def fixed(task: dict[str, str]) -> dict[str, float]:
        said = await ask("first", f"say {task['letter']}", **asked)
        return {"team": sum(letter in "abcdefgh" for letter in said) / 4}

    trainer(application(fixed), steps=1, **SETTINGS)
    said = " ".join(trainer.said.split())
    assert f"first: asks for temperature {asked['temperature']:g}; training samples at 1 (sampling.temperature)" in said
    (line,) = trainer.metrics()
    assert line["roles"]["first"]["groups"] == 3
    assert line["left_out"].keys() <= {"zero_variance", "zero_advantage", "trunk"}
    records = Records(trainer)
    trunks, branches = records.of(0)
    answers = {call.candidates[0].token_ids for e in (*trunks, *branches) for call in records.calls[e.id]}
    assert len(answers) == 12


def test_a_team_that_never_succeeds_is_no_error_and_ends_with_what_was_never_updated(trainer: Trainer):
    """Also where a judge finds all alike, and beside a role that never acts."""

    async def fails(task: dict[str, str]) -> None:
        await relay(task)

    app = application(fails)
    app.judge(lambda episodes, task: [0.5] * len(episodes))
    summary = trainer(app, steps=2, roles=["spare"], **{**SETTINGS, "policies": "lora"})
    assert summary.finished and summary.versions == {}
    tied = {role: {"no signal": 2} for role in ("first", "second", "third")}
    assert summary.stayed == {**tied, "spare": {"no sample": 2}}
    for line in trainer.metrics():
        left = line["left_out"]
        assert line["rows"] == 0 and left["zero_variance"] == 3 * line["replay"]["forks"]
        assert left["zero_variance"] + left["continuation"] + left.get("not_forked", 0) == line["candidates"]
    assert "no update: nothing to learn from in this step: first (no signal)" in trainer.said
