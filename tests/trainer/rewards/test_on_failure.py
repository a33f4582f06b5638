"""Failed episodes in training: left out, or trained on with the reward that the configuration gives them."""

from __future__ import annotations

import asyncio
import contextlib
import io

import httpx
import openai
import pytest
from rich.console import Console

import cotune
from cotune.cli.printing.overview import show_run
from cotune.errors import ConfigError, EngineLost
from cotune.integrations.models.transformers.sampler import TransformersSampler
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.sqlite_store import SqliteStore
from cotune.trainer.config.load import convert
from cotune.trainer.learner.local import LocalLearner
from tests.trainer.tiny_app import application, ask, converse, letters


async def fails_on_b(task):
    """Two calls of trained roles, one that fails, and an end that depends on the task."""
    said = await converse(task)
    if task["id"] == "b":
        raise RuntimeError("broken tool")
    return said


def groups_of(path) -> str:
    heard = io.StringIO()
    Console(file=heard, width=120).print(show_run(path, groups=True))
    return heard.getvalue()


@pytest.mark.parametrize(
    ("on_failure", "samples", "left_out"),
    [("exclude", 8, {"failed_episode": 8}), ("reward:-1", 12, {})],
)
def test_failed_episodes(trainer, on_failure, samples, left_out):
    app = application(fails_on_b)
    summary = trainer(app, steps=1, on_failure=on_failure, plan={"kind": "independent", "k": 4})
    line = trainer.metrics()[0]
    assert line["failed"] == 4
    assert line["roles"]["first"]["samples"] == samples
    assert summary.left_out.get("failed_episode", 0) == left_out.get("failed_episode", 0)
    said = groups_of(trainer.folder / "run")
    assert ("failed_episode" in said) == bool(left_out)


async def differs(task):
    """Fails in half of the episodes of a task, so that the penalty is what there is to learn from."""
    await ask("first", f"say {task['letter']}")
    differs.runs += 1
    if differs.runs % 2:
        raise RuntimeError("broken tool")
    return 0.5


def test_the_penalty_is_compared_with_the_rewards_of_the_others(trainer):
    differs.runs = 0
    summary = trainer(application(differs), steps=1, on_failure="reward:-1", concurrency=1, plan={"k": 4})
    line = trainer.metrics()[0]
    assert line["failed"] > 0
    assert line["rows"] == 12
    assert line["roles"]["first"]["group_spread"] > 0.5
    assert line["outcome"] == {"team": pytest.approx((0.5 - 1.0) / 2)}
    assert summary.versions == {"first": 1}


def test_calls_that_fail_are_not_trained_on_in_failed_episodes_either(trainer):
    """Nor are those that time out: the role is trained, and its other calls are."""

    async def run(task):
        said = await converse(task)
        if task["id"] == "b":
            await ask("second", "x" * 300)
        return said

    summary = trainer(application(run), steps=1, on_failure="reward:-1", plan={"k": 4})
    line = trainer.metrics()[0]
    assert line["failed"] == 4
    assert line["roles"]["second"]["samples"] == 12
    assert summary.left_out["failed_call"] == 4
    assert "failed_episode" not in summary.left_out


@pytest.mark.parametrize("value", ["drop", "reward:", "reward:much", "reward:nan"])
def test_the_field_is_named(value):
    allowed = r"^on_failure = .* is not lowest, exclude or reward:<number>\."
    with pytest.raises(ConfigError, match=allowed) as caught:
        convert({"model": "m", "on_failure": value})
    assert caught.value.field == "on_failure"


@pytest.mark.parametrize("value", ["nowhere:hide", "json:nothing", "plain", ":x"])
def test_a_redactor_that_is_not_there(trainer, value):
    with pytest.raises(ConfigError) as caught:
        trainer(application(), redact=value)
    assert caught.value.field == "redact"
    assert not (trainer.folder / "run").exists()


def test_an_action_that_crashes_half_the_time_is_worse_than_one_that_mostly_succeeds(trainer, monkeypatch):
    """Of 20 episodes 10 take A, which crashes in 5 and succeeds in 5, and 10 take B, which succeeds in 8.

    Left out, the crashes made A the better one (1 against 0.8). As outcomes of 0 the mean is 0.65 and the deviation
    sqrt(0.65 * 0.35) = 0.477, so A has the mean advantage (0.5 - 0.65) / 0.477 = -0.31 and B +0.31.
    """
    ran, trained = [], []

    async def act(task):
        number = len(ran)
        ran.append(number)
        await ask("first", "act")
        if 1 <= number <= 5:
            raise ValueError("the answer is no JSON")
        return 1.0 if number <= 10 or number >= 13 else 0.0

    def update(self, policy, rows, **how):
        trained.extend(rows)
        return original(self, policy, rows, **how)

    original = LocalLearner.update
    monkeypatch.setattr(LocalLearner, "update", update)
    settings = {"plan": {"k": 20}, "steps": 1, "tasks_per_step": 1, "concurrency": 1}
    trainer(application(act), tasks=[{"id": "t"}], **settings)
    assert len(trained) == 20
    order = sorted(trained, key=lambda row: row.id)  # ids are in the order of time
    means = [sum(row.advantage for row in part) / 10 for part in (order[:10], order[10:])]
    assert means == pytest.approx([-0.3145, 0.3145], abs=1e-3)
    assert trainer.metrics()[0]["failed"] == 5
    assert "outage" not in trainer.metrics()[0]["left_out"]


def _overflow(task):
    return ask("second", "x" * 300)


async def _bad_json(task):
    raise ValueError("no JSON")


async def _slow_tool(task):
    await asyncio.wait_for(asyncio.sleep(60), 0.01)


async def _unreachable(task):
    try:
        raise ConnectionRefusedError("the search service")
    except OSError as error:
        raise RuntimeError("the tool failed") from error


async def _down(task):
    try:
        raise ConnectionRefusedError("the search service")
    except OSError as error:
        raise cotune.Outage("The search service is down.") from error


async def _invented(task):
    """A tool is sent to an address that the policy has made up, after a call that was answered."""
    request = httpx.Request("GET", "http://shop.test/invented")
    httpx.Response(404, request=request).raise_for_status()


async def _engine(task):
    """The application passes on what the SDK raises, and another call is answered meanwhile."""
    try:
        await ask("second", "engine")
    except openai.APIStatusError as error:
        await ask("first", "meanwhile")
        raise RuntimeError("no answer") from error


async def _swallowed(task):
    """The application says nothing of what the engine did."""
    with contextlib.suppress(Exception):
        await ask("second", "engine")
    raise RuntimeError("no answer")


@pytest.mark.parametrize(
    ("fails", "blame"),
    [
        (_overflow, "policy"),
        pytest.param(_bad_json, "policy", marks=pytest.mark.long),
        (_slow_tool, "policy"),
        pytest.param(_unreachable, "policy", marks=pytest.mark.long),
        pytest.param(_invented, "policy", marks=pytest.mark.long),
        (_down, "infrastructure"),
        (_engine, "infrastructure"),
        (_swallowed, "infrastructure"),
    ],
)
def test_whose_doing_a_failure_is(trainer, monkeypatch, fails, blame):
    """In a run: the policy's is an outcome, the infrastructure's is left out and counted apart."""
    sample = TransformersSampler.sample

    async def lost(self, prompt, n, params, policy):
        if len(prompt) == len("<engine>") + 1:
            raise EngineLost("All engines are gone.")
        return await sample(self, prompt, n, params, policy)

    monkeypatch.setattr(TransformersSampler, "sample", lost)

    async def run(task):
        await ask("first", f"say {task['letter']}")
        if task["id"] == "c":
            await fails(task)
        return 1.0

    summary = trainer(application(run), steps=1, plan={"k": 2})
    store = SqliteStore.open(trainer.folder / "run", read_only=True)
    failed = [episode for episode in store.episodes(EpisodeFilters(phase="train")) if episode.status != "ok"]
    assert [(episode.task.id, episode.blame) for episode in failed] == [("c", blame)] * 2
    assert summary.left_out.get("outage", 0) == {_down: 2, _engine: 6, _swallowed: 4}.get(fails, 0)
    assert trainer.metrics()[0]["roles"]["first"]["samples"] == (6 if blame == "policy" else 4)


def test_under_a_tree_a_late_failure_keeps_groups_and_a_broken_candidate_costs_itself(trainer):
    """4 of 4 groups of the first role count although every episode fails after it; one candidate has no reward."""
    broken = []

    async def fails_late(task):
        said = await ask("first", f"say {task['letter']}")
        if broken:
            raise RuntimeError(f"cannot read {said}")
        return 1.0

    def scorer(candidate, call, task):
        if call.episode.phase == "train":
            broken.append(candidate.index)
            if len(broken) == 1:
                raise KeyError("no such move")
        return letters(candidate, call, task)

    summary = trainer(application(fails_late, first=scorer), steps=1, plan={"k": 8}, concurrency=1)
    line = trainer.metrics()[0]
    assert line["failed"] == 3 and summary.versions == {"first": 1}
    assert line["left_out"].pop("scorer_failed") == 1
    assert line["groups"] + line["left_out"].pop("zero_variance", 0) / 8 == 3
    assert line["left_out"].keys() <= {"zero_advantage"}
    assert "scorer failed on 1 candidate, not trained on: The scorer of role 'first' raised KeyError" in (trainer.said)
