"""Recorded episodes of the three frameworks and of the plain SDK run again: answered from the record, and told apart
where they differ."""

from __future__ import annotations

import asyncio
import random
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, ToolMessage

from cotune.episodes.rollout import EpisodeBatch, rollout
from cotune.episodes.workflows import workflow, workflow_of
from cotune.errors import RecordError
from cotune.records.structs import CallRecord, Episode, Task
from cotune.replay.script import Replay, read_script
from cotune.storage.sqlite_store import SqliteStore
from tests.integrations import replay_apps
from tests.integrations.recorded import Responder, answer, asks, tool_call

pytestmark = pytest.mark.usefixtures("nowhere")


async def reply(call: Any) -> Any:
    """Says something new at each call, after a time of its own; calls a tool where one is offered."""
    await asyncio.sleep(random.random() * 0.01)
    if call.tools and call.turn == 0:
        name = call.tools[0]["function"]["name"]
        return asks(tool_call(name, {"task" if name == "expert" else "q": str(random.random())}, f"c{random.random()}"))
    return f"{call.role} {random.random()}"


class Lab:
    """Records episodes of an application, and runs them again."""

    def __init__(self, folder: Path, app: Any) -> None:
        self.name = getattr(app, "__name__", "")
        self.store = SqliteStore.open(folder)
        self.flow = workflow_of(workflow(app))
        self.policy = Responder(reply)
        """Answers what is new when episodes are run again."""

    async def run(self, numbers: Any, replays: Any = None, responder: Any = None) -> list[Episode]:
        batch = EpisodeBatch(
            tasks=[Task(id=str(n), input={"n": n}) for n in numbers],
            sink=self.store,
            phase="trace" if replays is None else "replay",
            concurrency=20,
            replays=replays or {},
        )
        episodes = await rollout(self.flow, batch, responder or self.policy)
        self.store.flush()
        return episodes

    def record(self, *numbers: int) -> list[Episode]:
        episodes = asyncio.run(self.run(numbers, responder=Responder(reply)))
        assert [e.error for e in episodes] == [None] * len(numbers)
        return episodes

    def again(self, trunks: list[Episode], **fork: Any) -> list[Episode]:
        """Run episodes again, each with this fork."""
        scripts = {(e.task.id, 1): Replay(script=read_script(self.store, e.id), **fork) for e in trunks}
        return asyncio.run(self.run([e.task.input["n"] for e in trunks], scripts))

    def requests(self, episode: Episode) -> list[tuple[Any, ...]]:
        """What an episode asked, with what was answered, whatever the order."""
        calls = self.store.calls(episode.id)
        return sorted((c.role, c.messages, c.tools or "", c.candidates[0].text, c.prompt or "") for c in calls)

    def call(self, episode: Episode, role: str, turn: int = 0) -> CallRecord:
        return next(c for c in self.store.calls(episode.id) if (c.role, c.turn) == (role, turn))


@pytest.fixture(params=list(replay_apps.APPLICATIONS))
def lab(request: pytest.FixtureRequest, tmp_path: Path) -> Lab:
    return Lab(tmp_path, replay_apps.APPLICATIONS[request.param])


COUNTS = [4, pytest.param(200, marks=pytest.mark.long)]


@pytest.mark.parametrize("count", COUNTS)
def test_a_recorded_episode_is_answered_from_the_record_alone(lab: Lab, count: int):
    trunks = lab.record(*range(count))
    again = lab.again(trunks)
    assert [e.error for e in again] == [None] * count
    assert lab.policy.calls == []
    assert [lab.requests(e) for e in again] == [lab.requests(e) for e in trunks]
    assert all(c.replayed for e in again for c in lab.store.calls(e.id))
    rewards = [lab.store.rewards([e.id])[e.id] for e in (*trunks, *again)]
    assert rewards[:count] == rewards[count:]
    calls = sum(episode.calls for episode in again)
    sys.stdout.write(f"\n{lab.name}: {count} episodes, {calls} calls from the record, 0 by the policy\n")


@pytest.mark.parametrize("count", COUNTS)
def test_a_fork_anywhere_repeats_all_before_it_and_nothing_else(lab: Lab, count: int):
    """At each call of a few episodes, or at one call of each of many."""
    trunks = lab.record(*range(count if count > 4 else 2))
    few = len(trunks) < count
    forks = [(trunk, fork) for trunk in trunks for fork in some(lab.store.calls(trunk.id), few)]
    scripts = {trunk.id: read_script(lab.store, trunk.id) for trunk in trunks}
    replays = {
        (trunk.task.id, 1 + number): Replay(script=scripts[trunk.id], fork=fork.id)
        for number, (trunk, fork) in enumerate(forks)
    }
    branches = asyncio.run(lab.run([trunk.task.input["n"] for trunk in trunks], replays))
    assert [branch.error for branch in branches] == [None] * len(forks)
    new = repeated = 0
    for branch, (_, fork) in zip(branches, forks, strict=True):
        calls = lab.store.calls(branch.id)
        was = {call.id: call for call in lab.store.calls(branch.fork.trunk)}
        again = [call for call in calls if call.replayed is not None]
        assert {call.replayed for call in again} >= scripts[branch.fork.trunk].unaffected_calls(fork.id)
        for call in again:
            recorded = was[call.replayed]
            assert (call.role, call.messages, call.tools) == (recorded.role, recorded.messages, recorded.tools)
            assert (call.candidates, call.prompt) == (recorded.candidates, recorded.prompt)
        at = next(call for call in calls if call.id == branch.fork.at)
        assert (branch.fork.call, at.role, at.messages) == (fork.id, fork.role, fork.messages)
        assert all(call.replayed or call.step >= at.step for call in calls)
        new, repeated = new + len(calls) - len(again), repeated + len(again)
    assert new == len(lab.policy.calls)
    said = f"{len(forks)} forks, {repeated} calls from the record, {new} by the policy from the forks on"
    sys.stdout.write(f"\n{lab.name}: {said}\n")


def some(calls: list[CallRecord], all_of_them: bool) -> list[CallRecord]:
    return calls if all_of_them else [random.choice(calls)]


LASTS = {"langgraph": ("close", "join"), "autogen": ("says", "end"), "crewai": ("Join",), "sdk": ("last",)}
"""The roles that speak last, with a prompt of their own."""


@pytest.mark.parametrize("count", COUNTS)
def test_a_prompt_that_changes_later_is_a_divergence_there(lab: Lab, monkeypatch: pytest.MonkeyPatch, count: int):
    trunks = lab.record(*range(count if count > 4 else 2))
    monkeypatch.setitem(replay_apps.WORDS, "last", "Be short.")
    for trunk, episode in zip(trunks, lab.again(trunks), strict=True):
        calls = lab.store.calls(episode.id)
        told = next(call for call in calls if call.replayed is None)
        assert told.role in LASTS[lab.name] and all(call.replayed for call in calls if call.step < told.step)
        assert {c.id for c in lab.store.calls(trunk.id) if c.role != told.role} == {c.replayed for c in calls} - {None}
        assert episode.error.startswith(
            f"Turn {told.turn} of role {told.role!r} differs from the record in message 1 ("
        )
        assert "Be brief." in episode.error and "Be short." in episode.error and episode.blame == "divergence"
    assert lab.policy.calls == []


def test_a_changed_prompt_is_a_divergence_at_its_call(lab: Lab, monkeypatch: pytest.MonkeyPatch):
    trunks = lab.record(0, 1)
    monkeypatch.setitem(replay_apps.WORDS, "system", "Be brie, please.")
    again = lab.again(trunks)
    assert lab.policy.calls == []
    for trunk, episode in zip(trunks, again, strict=True):
        first = {c.role for c in lab.store.calls(trunk.id) if not c.parents}
        assert (episode.status, episode.blame) == ("error", "divergence")
        assert "differs from the record in message 1 (" in episode.error
        assert "recorded '" in episode.error and "Be brief." in episode.error and "Be brie, please." in episode.error
        assert any(episode.error.startswith(f"Turn 0 of role {role!r} differs") for role in first)


FORKS = {"langgraph": ("team/check", "helper", "close"), "autogen": ("expert", "asks", "says"), "crewai": ("Join",)}
"""By framework, a role of the application, and those whose calls depend on what it says."""


def test_a_fork_goes_on_with_the_policy_from_its_call_on(tmp_path: Path):
    for name, (role, *later) in FORKS.items():
        lab = Lab(tmp_path / name, replay_apps.APPLICATIONS[name])
        (trunk,) = lab.record(0)
        fork = lab.call(trunk, role)
        (branch,) = lab.again([trunk], fork=fork.id)
        assert branch.error is None
        at = lab.call(branch, role)
        assert (branch.fork.trunk, branch.fork.call, branch.fork.at) == (trunk.id, fork.id, at.id)
        assert at.prompt == fork.prompt and at.messages == fork.messages and at.replayed is None
        assert at.candidates[0].message != fork.candidates[0].message
        new = [c for c in lab.store.calls(branch.id) if c.replayed is None]
        assert {role, *later} == {c.role for c in new} and len(new) == len(lab.policy.calls)
        assert lab.policy.calls[0].role == role


def side_by_side(lab: Lab) -> Episode:
    """An episode whose three workers are answered once all have asked, so that none began after another had ended."""
    asked = []

    async def together(call: Any) -> Any:
        asked.append(call.role)
        while asked.count("worker") < 3:
            await asyncio.sleep(0.005)
        return await reply(call)

    (trunk,) = asyncio.run(lab.run([1], responder=Responder(together)))
    return trunk


def test_siblings_of_a_parallel_part_keep_what_they_said(tmp_path: Path):
    """The fork is one of three equal workers; the other two and nothing after them come from the record."""
    lab = Lab(tmp_path, replay_apps.langgraph)
    trunk = side_by_side(lab)
    for turn in range(3):
        fork = lab.call(trunk, "worker", turn)
        (branch,) = lab.again([trunk], fork=fork.id)
        calls = lab.store.calls(branch.id)
        assert [c.role for c in calls if c.replayed is None] == ["worker", "join"]
        assert {c.replayed for c in calls if c.replayed} == {
            c.id for c in lab.store.calls(trunk.id) if c.role == "worker" and c.id != fork.id
        }


def test_a_given_answer_is_said_at_the_fork(tmp_path: Path):
    lab = Lab(tmp_path, replay_apps.langgraph)
    trunk = side_by_side(lab)
    (branch,) = lab.again([trunk], fork=lab.call(trunk, "worker", 1).id, answer=answer("given"))
    said = lab.store.message(lab.call(branch, "join").messages[0])["content"]
    assert "given" in said and len(lab.policy.calls) == 1


def test_answers_come_in_the_order_in_which_they_came(tmp_path: Path):
    """AutoGen puts side by side answers into the next prompt as they come: in the order of the record or in none."""

    answered: dict[str, asyncio.Event] = {}

    async def right_first(call: Any) -> Any:
        right = answered.setdefault(call.episode.id, asyncio.Event())
        if call.role == "left":
            await right.wait()
            await asyncio.sleep(0.1)
        answer = await reply(call)
        if call.role == "right":
            right.set()
        return answer

    lab = Lab(tmp_path, replay_apps.autogen)
    trunks = asyncio.run(lab.run([1, 3, 5], responder=Responder(right_first)))
    assert [e.error for e in lab.again(trunks)] == [None] * 3


async def swallowing(task: Any) -> float:
    """Answers one question, and a second that depends on the application's state; any failure is worth 0."""
    try:
        first = await replay_apps.model.ainvoke(f"first {task['n']}")
        for number in range(COUNT["calls"]):
            await replay_apps.model.ainvoke(f"then {number} {first.content}")
    except Exception:  # noqa: BLE001
        return 0.0
    return 1.0


COUNT = {"calls": 2}


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        (1, "Turn 2 of role 'app', which is in the record, is not asked this time."),
        (3, "Turn 3 of role 'app' is not in the record, which has 3 calls of that role."),
    ],
)
def test_calls_more_or_less_are_a_divergence_though_the_application_swallows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int, text: str
):
    lab = Lab(tmp_path, swallowing)
    trunks = lab.record(7)
    monkeypatch.setitem(COUNT, "calls", calls)
    (again,) = lab.again(trunks)
    assert (again.status, again.blame) == ("error", "divergence")
    assert text in again.error


def test_a_fork_that_is_not_reached_is_a_divergence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lab = Lab(tmp_path, swallowing)
    (trunk,) = lab.record(7)
    monkeypatch.setitem(COUNT, "calls", 1)
    (again,) = lab.again([trunk], fork=lab.call(trunk, "app", 2).id)
    assert again.blame == "divergence" and "Turn 2 of role 'app'" in again.error and again.fork is None


def test_the_first_difference_names_message_and_characters(tmp_path: Path):
    lab = Lab(tmp_path, swallowing)
    (trunk,) = lab.record(7)
    script = read_script(lab.store, trunk.id)

    async def other(task: Any) -> float:
        await replay_apps.model.ainvoke([("system", "s"), ("user", "first 7")] if task["n"] else "first 9")
        return 1.0

    def differs(number: int) -> str:
        other_lab = Lab(tmp_path / str(number), other)
        replays = {(str(number), 1): Replay(script=script)}
        (episode,) = asyncio.run(other_lab.run([number], replays))
        return episode.error

    shown = "message 1 (user), character 7: recorded 'first 7', now 'first 9'."
    assert f"Turn 0 of role 'app' differs from the record in {shown}" in differs(0)
    assert "differs from the record in message 1 (system), role, character 1: recorded 'user', now 'system'" in differs(
        1
    )


async def named_anew(task: Any) -> float:
    """Hands over as supervisors do, with ids that the application makes; other ids name the request itself."""
    use = {"id": f"call_{uuid.uuid4()}", "name": "transfer", "args": {"to": "b"}}
    handed = [
        replay_apps.HumanMessage("go", id=str(uuid.uuid4())),
        AIMessage("", tool_calls=[use], id=str(uuid.uuid4())),
        ToolMessage(replay_apps.WORDS["system"], tool_call_id=use["id"], id=str(uuid.uuid4())),
    ]
    await replay_apps.model.bind(user=str(uuid.uuid4()), prompt_cache_key=str(uuid.uuid4())).ainvoke(handed)
    return 1.0


def test_ids_do_not_tell_requests_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lab = Lab(tmp_path, named_anew)
    trunks = lab.record(0)
    assert [e.error for e in lab.again(trunks)] == [None] and lab.policy.calls == []
    monkeypatch.setitem(replay_apps.WORDS, "system", "Be long.")
    (again,) = lab.again(trunks)
    assert "differs from the record in message 3 (tool), character 4: recorded 'Be brief.'" in again.error


def test_an_episode_without_calls_or_unknown_is_refused(tmp_path: Path):
    lab = Lab(tmp_path, swallowing)
    with pytest.raises(RecordError, match="has no recorded call"):
        read_script(lab.store, "01NOBODY")
