"""Runs whose rewards come from a judge: over HTTP, kept in the run folder, or a role that is recorded and trained."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cotune
from cotune.errors import GroupError, WorkflowError
from cotune.judging.ledger import Ledger
from cotune.judging.shown import shown_message
from cotune.storage.sqlite_store import SqliteStore
from tests.integrations.judge_server import by, entries, says
from tests.integrations.provider import Provider, serving
from tests.integrations.tiny_models import build
from tests.trainer.conftest import Trainer
from tests.trainer.test_rewards import calls_of
from tests.trainer.tiny_app import application, ask


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
    judge = cotune.Judge(model="m", rubric="Early letters.", base_url=server.url, api_key="none", **settings)
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
        "scorer failed on 4 candidates, which are not trained on: The judge m was asked twice in vain: its answer "
        "cannot be used: it has no JSON object with a ranking." in " ".join(trainer.said.split())
    )


def test_a_judge_that_never_answers_well_stops_the_run_before_it_begins(server: Provider, trainer: Trainer) -> None:
    server.reply = lambda body, number: says("I cannot say")
    with pytest.raises(WorkflowError, match=r"The judge m was asked twice in vain.* So it went on all 3 calls"):
        trainer(judged(server))
    assert not (trainer.folder / "run").exists()


def test_a_judge_over_its_budget_stops_the_run_and_a_larger_one_goes_on(server: Provider, trainer: Trainer) -> None:
    with pytest.raises(GroupError, match="over its budget: another request would pass max_calls = 4"):
        trainer(judged(server, max_calls=4), steps=3)
    assert len(server.requests) == 4
    summary = trainer.resume(judged(server, max_calls=40))
    assert summary.finished and summary.steps == 3


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
    app.scorer("writer", group=True)(cotune.Judge(role="critic", rubric="Shorter.", reason=False, max_tokens=64))
    trainer(app, model=str(speaking), plan={"k": 2}, steps=2)
    ended = [line["roles"]["critic"]["kept"] for line in trainer.metrics()]
    assert all(kept >= 2 * 3 for kept in ended)
    with SqliteStore.open(trainer.folder / "run", read_only=True) as store:
        episodes = list(store.episodes(phase="train"))
        for episode in episodes:
            calls = store.calls(episode.id)
            assert len(calls) == episode.calls and [c.role for c in calls][:2] == ["writer", "critic"]
            writer, critic = calls[:2]
            assert critic.integration == "judge" and critic.policy is not None and critic.policy.name == "critic"
            body = {"messages": [store.message(name) for name in critic.messages]}
            assert sorted(entries(body).values()) == sorted(c.message["content"] for c in writer.candidates)
            rewards = store.rewards([f"{writer.id}.{c.index}" for c in writer.candidates])
            assert len(rewards) in (0, 2)
