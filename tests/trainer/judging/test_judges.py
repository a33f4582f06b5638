"""Runs whose rewards come from a judge: over HTTP, kept in the run folder, or a role that is recorded and trained."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cotune
from cotune.errors import GroupError, JudgeError, WorkflowError
from cotune.judging.episodes import finished
from cotune.judging.shown import shown_message
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.judge_ledger import Ledger
from cotune.storage.sqlite_store import SqliteStore
from cotune.trainer.before.check.dry_run import check
from cotune.trainer.config.load import convert
from cotune.types import JudgeSettings
from tests.integrations.judge_server import by, entries, says
from tests.integrations.provider import Provider, serving
from tests.integrations.tiny_models import build
from tests.trainer.conftest import Trainer
from tests.trainer.rewards.test_rewards import calls_of
from tests.trainer.tiny_app import TASKS, application, ask

pytestmark = pytest.mark.usefixtures("_no_provider")
SHORT = JudgeSettings(reason=False, max_tokens=64)


@pytest.fixture
def server() -> Iterator[Provider]:
    with serving() as made:
        made.reply = by(early)
        yield made


def early(text: str) -> float:
    """Letters a to h in a reply: what the judge likes."""
    return sum(letter in "abcdefgh" for letter in text)


def judged(server: Provider, **settings: Any) -> Any:
    """The tiny application, its first role judged over HTTP."""
    made = application()
    price, how = settings.pop("price", None), JudgeSettings(**settings)
    judge = cotune.Judge(
        model="m", rubric="Early letters.", base_url=server.url, api_key="none", price=price, settings=how
    )
    made.scorer("first", group=True)(judge)
    return made


def test_a_run_learns_from_ranks_and_another_with_its_answers_asks_nothing(server: Provider, trainer: Trainer) -> None:
    kept = trainer.folder / "kept"
    summary = trainer(judged(server, folder=kept, price=(1.0, 2.0)))
    assert summary.finished and summary.versions["first"] == 2
    for call, rewards in calls_of(trainer.folder / "run"):
        if call.role == "first":
            likes = [early(shown_message(c.message)) for c in call.candidates]
            better = [sum((a > b) + (a == b) / 2 for b in likes) - 0.5 for a in likes]
            assert [r["judge"] for r in rewards] == pytest.approx([b / 3 for b in better])
        else:
            assert rewards == [{}] * len(call.candidates)
    with SqliteStore.open(trainer.folder / "run", read_only=True) as store:
        calls = [call for episode in store.episodes(EpisodeFilters(phase="train")) for call in store.calls(episode.id)]
        targets = {call.role: [f"{call.id}.{c.index}" for c in call.candidates] for call in calls}
        told = [text["judge"] for text in store.feedback(targets["first"]).values() if text]
        assert told and all(re.fullmatch(r"This is [A-D]\. so", text) for text in told)
        assert not any(store.feedback(targets["second"]).values())
        bodies = [str(store.message(id)) for call in calls for id in call.messages]
        assert bodies and not any("This is" in body for body in bodies), "no prompt has the judge's reason"
    asked = len(server.requests)
    assert 0 < asked <= 3 + 2 * 3, "the preflight's episodes and two steps of three: one request for each group"

    again = trainer(judged(server, folder=kept, price=(1.0, 2.0)), to="again")
    assert again.finished and len(server.requests) == asked


def test_what_a_judge_did_is_in_the_metrics_and_kept_in_the_run_folder(server: Provider, trainer: Trainer) -> None:
    trainer(judged(server, price=(1.0, 2.0), passes=2))
    counters = [line["counters"] for line in trainer.metrics()]
    for counted in counters:
        assert counted["judge.requests"] + counted.get("judge.cached", 0) == 6
        assert counted["judge.cost"] == pytest.approx(counted["judge.requests"] * (7 * 1.0 + 3 * 2.0) / 1e6)
    assert f"judge: requests {counters[0]['judge.requests']:.0f}" in trainer.said
    assert Ledger(trainer.folder / "run").totals()["requests"] == len(server.requests)


def test_groups_that_the_judge_gives_up_are_left_out_and_counted(server: Provider, trainer: Trainer) -> None:
    def moody(body: dict[str, Any], number: int) -> Any:
        return says("I cannot say") if "say b" in body["messages"][1]["content"] else by(early)(body, number)

    server.reply = moody
    summary = trainer(judged(server), steps=1)
    assert summary.finished and summary.left_out["scorer_failed"] == 4
    assert "judge: requests 4, asked again 1, dropped 1" in trainer.said
    assert (
        "scorer failed on 4 candidates, not trained on: The judge m was asked twice in vain: its answer "
        "cannot be used: it has no JSON object with a ranking." in " ".join(trainer.said.split())
    )


def test_a_judge_that_never_answers_well_stops_the_run_before_it_begins(server: Provider, trainer: Trainer) -> None:
    server.reply = lambda body, number: says("I cannot say")
    with pytest.raises(WorkflowError, match=r"The judge m was asked twice in vain.* This happened on all 3 calls"):
        trainer(judged(server))
    assert not (trainer.folder / "run").exists()


def test_a_judge_over_its_budget_stops_the_run_and_a_larger_one_goes_on(server: Provider, trainer: Trainer) -> None:
    with pytest.raises(GroupError, match="used its budget: another request would exceed max_calls = 4"):
        trainer(judged(server, max_calls=4), steps=3)
    assert len(server.requests) == 4
    summary = trainer.resume(judged(server, max_calls=40))
    assert summary.finished and summary.steps == 3


async def tell(task: Any) -> None:
    """Two calls, and no reward."""
    heard = await ask("first", f"say {task['letter']}")
    await ask("second", f"after {heard}")


INDEPENDENT = {"kind": "independent", "k": 4}


def test_a_run_without_any_reward_learns_from_a_judge_of_its_episodes(server: Provider, trainer: Trainer) -> None:
    app = application(tell)
    how = JudgeSettings(name="early")
    app.judge(cotune.Judge(model="m", rubric="Early letters.", base_url=server.url, api_key="none", settings=how))
    summary = trainer(app, plan=INDEPENDENT)
    assert summary.finished and summary.versions == {"first": 2, "second": 2}
    assert "first learns from early (the episode's outcome)" in trainer.said
    assert len(server.requests) == 1 + 2 * 3, "two episodes of the first task before the run; then one for each group"
    shown = entries(server.requests[-1])
    assert len(shown) == 4 and all(text.count("[first answers]") == 1 for text in shown.values())
    with SqliteStore.open(trainer.folder / "run", read_only=True) as store:
        episodes = list(store.episodes(EpisodeFilters(phase="train", training_step=1)))
        rewards = store.rewards([episode.id for episode in episodes])
        for letter in "abc":
            values = {e.id: rewards[e.id]["early"] for e in episodes if e.task.id == letter}
            likes = {id: early(finished(store, store.episode(id)).transcript) for id in values}
            best, worst = max(likes, key=likes.__getitem__), min(likes, key=likes.__getitem__)
            assert sum(values.values()) == pytest.approx(2.0) and values[best] >= values[worst]
    assert [line["outcome"]["early"] for line in trainer.metrics()] == pytest.approx([0.5, 0.5])


def test_judging_begins_with_the_last_episode_of_a_task(trainer: Trainer) -> None:
    """Episodes of the last task end when those of the others have been judged, and not before."""
    judged: list[str] = []

    async def waiting(task: Any) -> None:
        await tell(task)
        while task["letter"] == "c" and len(judged) < 2:
            await asyncio.sleep(0.005)

    app = application(waiting)

    @app.judge
    async def panel(episodes: Any, task: Any) -> list[float]:
        judged.extend(task["letter"] for _ in episodes[3:4])  # not those that the application is looked at with
        return [early(e.calls[0].answer.text) for e in episodes]

    trainer(app, plan=INDEPENDENT, steps=1, episode_timeout=10.0)
    (line,) = trainer.metrics()
    assert line["failed"] == 0 and sorted(judged[:2]) == ["a", "b"] and judged[2:] == ["c"]
    assert "missing_reward" not in line["left_out"]


def test_the_branches_of_a_task_are_judged_with_their_trunk(trainer: Trainer) -> None:
    together: list[tuple[str, int]] = []
    app = application(tell)

    @app.judge
    def panel(episodes: Any, task: Any) -> list[float]:
        together.append((task["letter"], len(episodes)))
        return [early(e.calls[0].answer.text) for e in episodes]

    trainer(app, plan={"kind": "replay", "k": 3}, steps=1)
    assert sorted(together[-3:]) == [("a", 7), ("b", 7), ("c", 7)]  # a trunk, and three branches at each of two calls
    (line,) = trainer.metrics()
    assert "missing_reward" not in line["left_out"] and line["groups"] > 0


def test_a_judge_may_be_a_function_that_fails_on_one_task(trainer: Trainer) -> None:
    app = application(tell)

    @app.judge
    async def panel(episodes: Any, task: Any) -> Any:
        if task["letter"] == "b":
            raise KeyError("no opinion")
        await asyncio.sleep(0.01)
        return [None if task["letter"] == "c" else {"early": early(e.calls[0].answer.text)} for e in episodes]

    summary = trainer(app, plan=INDEPENDENT, steps=1)
    assert summary.left_out["missing_reward"] == 2 * 2 * 4
    assert (
        "the judge gave 4 episodes no outcome, which are not trained on: The episode judge raised KeyError: "
        "'no opinion'" in " ".join(trainer.said.split())
    )


def test_a_judge_that_fails_on_all_episodes_ends_the_run_with_its_error(server: Provider, trainer: Trainer) -> None:
    def app(max_calls: int) -> Any:
        made, how = application(tell), JudgeSettings(max_calls=max_calls)
        made.judge(cotune.Judge(model="m", rubric="Early.", base_url=server.url, api_key="none", settings=how))
        return made

    with pytest.raises(JudgeError, match="max_calls = 4"):
        trainer(app(4), plan=INDEPENDENT)
    assert len(server.requests) == 4
    assert trainer.resume(app(7)).finished
    assert len(server.requests) == 7, "nothing was judged twice"


def test_a_run_that_would_learn_from_rewards_that_nobody_gives_does_not_begin(trainer: Trainer) -> None:
    app = application(tell)
    app.scorer("first", group=True)(lambda candidates, call, task: [None] * len(candidates))
    with pytest.raises(
        WorkflowError, match="no answer has a reward, so nothing can be learned under the plan independ"
    ):
        trainer(app, plan=INDEPENDENT)


def test_a_dry_run_asks_no_judge(server: Provider) -> None:
    settings = {"model": "m", "rubric": "Early.", "base_url": server.url, "api_key": "none"}
    app = application(tell, second=lambda candidate, call, task: 1.0)
    app.scorer("first", group=True)(cotune.Judge(**settings))
    found = check(app, TASKS, convert({"model": "none"}))
    assert found.local["first"]["judge"] == (0.0, 1.0)

    app = application(tell)
    app.judge(cotune.Judge(**settings))
    found = check(app, TASKS, convert({"model": "none"}))
    assert "it was not asked: a dry run invents its outcomes." in [finding.text for finding in found.findings]
    assert not [finding for finding in found.findings if finding.level == "blocks"]
    assert server.requests == []


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judge") / "base"
    build("qwen3", folder)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"max_position_embeddings": 512', '"max_position_embeddings": 2048'))
    return folder


async def write(task: Any) -> float:
    await ask("writer", f"say {task['letter']}", max_tokens=3)
    return 0.0


def test_a_judge_that_is_a_role_is_recorded_and_trained_like_any(speaking: Path, trainer: Trainer) -> None:
    app = application(write, critic=lambda candidate, call, task: len(candidate.text))
    app.scorer("writer", group=True)(cotune.Judge(role="critic", rubric="Shorter.", settings=SHORT))
    trainer(app, model=str(speaking), plan={"k": 2}, steps=2)
    ended = [line["roles"]["critic"]["kept"] for line in trainer.metrics()]
    assert all(kept >= 2 * 3 for kept in ended)
    with SqliteStore.open(trainer.folder / "run", read_only=True) as store:
        episodes = list(store.episodes(EpisodeFilters(phase="train")))
        for episode in episodes:
            calls = store.calls(episode.id)
            assert len(calls) == episode.calls and [c.role for c in calls][:2] == ["writer", "critic"]
            writer, critic = calls[:2]
            assert critic.integration == "judge" and critic.policy is not None and critic.policy.name == "critic"
            body = {"messages": [store.message(name) for name in critic.messages]}
            assert sorted(entries(body).values()) == sorted(c.message["content"] for c in writer.candidates)
            rewards = store.rewards([f"{writer.id}.{c.index}" for c in writer.candidates])
            assert len(rewards) in (0, 2)


@pytest.fixture
def by_role() -> Any:
    """Its episodes are judged by one of its own roles, whose answers a scorer likes the longer the better."""
    app = application(only_write, critic=lambda candidate, call, task: len(candidate.text))
    app.judge(cotune.Judge(role="critic", rubric="Shorter.", settings=SHORT))
    return app


async def only_write(task: Any) -> None:
    await ask("writer", f"say {task['letter']}", max_tokens=3)


def test_a_judge_of_whole_episodes_that_is_a_role_is_recorded_and_trained(
    speaking: Path, trainer: Trainer, by_role: Any
) -> None:
    plan = {"kind": "independent", "k": 2}
    summary = trainer(by_role, model=str(speaking), plan=plan, recipe="dr_mas", steps=3)
    lines = trainer.metrics()
    assert summary.finished and summary.versions["critic"] == 3
    assert [line["episodes"] for line in lines] == [6] * 3, "those of judging are not among them"
    usable = 0
    with SqliteStore.open(trainer.folder / "run", read_only=True) as store:
        for step, letter in itertools.product(range(3), "abc"):
            wrote = [
                e for e in store.episodes(EpisodeFilters(phase="train", training_step=step)) if e.task.id == letter
            ]
            judged = store.episodes(EpisodeFilters(phase="judge", training_step=step))
            attempts = {e.rollout: e for e in judged if e.task.id == f"{letter} (judged)"}
            transcripts = [finished(store, e).transcript for e in wrote]
            if transcripts[0] == transcripts[1]:
                continue
            assert set(attempts) == {0, 1}, "each task is judged as often as it is run"
            values = []
            for attempt in attempts.values():
                calls = store.calls(attempt.id)
                assert {(c.role, c.integration, c.policy.name, c.policy.version) for c in calls} == {
                    ("critic", "judge", "critic", step)
                }
                shown = entries({"messages": [store.message(name) for name in calls[-1].messages]})
                assert sorted(shown.values()) == sorted(transcripts)
                lengths = [len(call.candidates[0].text) for call in calls]
                outcome = store.rewards([attempt.id])[attempt.id]
                assert outcome == {"local": pytest.approx(sum(lengths) / len(lengths))}
                ranks = re.findall("[AB]", calls[-1].candidates[0].text)
                if sorted(ranks) == ["A", "B"]:
                    equal = len(json.loads(calls[-1].candidates[0].text)["ranking"]) == 1
                    values.append([0.5 if equal else float(shown[ranks[0]] == text) for text in transcripts])
            usable += len(values)
            given = store.rewards([e.id for e in wrote])
            expected = [{"judge": sum(of) / len(values)} for of in zip(*values, strict=True)] or [{}, {}]
            assert [given.get(e.id, {}) for e in wrote] == expected
    assert usable >= 1, "of 18 attempts at least one can be used"


def test_a_dry_run_sees_the_role_that_judges(by_role: Any) -> None:
    found = check(by_role, TASKS, convert({"model": "none", "recipe": "dr_mas"}))
    assert not [finding.text for finding in found.findings if finding.level == "blocks"]
    assert {role.role: role.trained for role in found.roles} == {"writer": True, "critic": True}
