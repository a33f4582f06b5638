"""What holds of every recording, whatever starts, tokens, ends, errors and cancellations come in which order."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from cotune.episodes.tracing import Within
from cotune.errors import RecordError
from cotune.recording.call_records import CallerContext
from cotune.recording.recorder import LiveCall, LiveEpisode
from cotune.records.answers import Answer
from cotune.records.structs import CallRecord, Candidate, Episode, Message, PolicyRef, RewardRecord, Segment, Task

STATUSES = ("error", "timeout", "cancelled", "malformed")
ROLES = st.sampled_from(["planner", "coder", "judge"])
TEXTS = st.sampled_from(["a", "b", "c"])
TOKENS = st.lists(st.integers(1, 3), min_size=1, max_size=4).map(tuple)


class Sink(list):
    """Keeps records in the order in which they are written; safe from any thread."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def write(self, records):
        with self.lock:
            self.extend(records)

    def of(self, kind):
        return [record for record in self if isinstance(record, kind)]


class Kept:
    """What happened to one call, as the test saw it."""

    def __init__(self, call: LiveCall, episode: LiveEpisode, role: str, messages: list[Any], step: int, turn: int):
        self.call = call
        self.episode = episode
        self.role = role
        self.messages = messages
        self.step = step
        self.turn = turn
        self.end: tuple[str, Answer | None] | None = None
        self.ended_before: set[str] = set()


def answer_of(texts, prompt, chosen=0) -> Answer:
    candidates = tuple(
        Candidate(
            index=i,
            text=text,
            message={"role": "assistant", "content": text},
            token_ids=(*prompt, i),
            logprobs=(-1.0,) * (len(prompt) + 1),
        )
        for i, text in enumerate(texts)
    )
    rewards = tuple({"local": float(i)} for i in range(len(texts)))
    return Answer(candidates=candidates, chosen=chosen, prompt_ids=prompt, policy=PolicyRef("p", 1), rewards=rewards)


def tokens_of(sink: Sink, name: str | None) -> tuple[int, ...]:
    segments = {s.id: s for s in sink.of(Segment)}
    path: tuple[int, ...] = ()
    while name is not None:
        path, name = (*segments[name].token_ids, *path), segments[name].parent
    return path


def check_order(sink: Sink, episode: LiveEpisode) -> None:
    """Numbers without holes, parents that were there before, one end each; nothing after the episode's own."""
    calls = sorted((c for c in sink.of(CallRecord) if c.episode == episode.id), key=lambda c: c.step)
    assert len({c.id for c in calls}) == len(calls)
    steps = {c.id: c.step for c in calls}
    for call in calls:
        assert all(steps[parent] < call.step for parent in call.parents)
    ends = [i for i, r in enumerate(sink) if isinstance(r, Episode) and r.id == episode.id]
    if not ends:
        return
    (end,) = ends
    assert [c.step for c in calls] == list(range(len(calls)))
    for role in {c.role for c in calls}:
        assert [c.turn for c in calls if c.role == role] == list(range(sum(c.role == role for c in calls)))
    record = sink[end]
    assert record.calls == len(calls)
    assert episode.failures == Counter(c.status for c in calls if c.status != "ok")
    mine = {episode.id, *(f"{c.id}.{x.index}" for c in calls for x in c.candidates)}
    late = [r for r in sink[end + 1 :] if getattr(r, "episode", None) == episode.id]
    assert late == []
    assert [r for r in sink[end + 1 :] if isinstance(r, RewardRecord) and r.target in mine] == []


class Recording(RuleBasedStateMachine):
    """Several episodes at once, some inside others, driven from threads and tasks in any order."""

    episodes = Bundle("episodes")
    calls = Bundle("calls")

    @initialize()
    def begin(self) -> None:
        self.sink = Sink()
        self.kept: list[Kept] = []
        self.living: list[LiveEpisode] = []
        self.done: dict[str, str] = {}
        self.pool = ThreadPoolExecutor(2)

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for episode in self.living:
                if not episode.ended:
                    episode.end("ok")
            self.everything_is_recorded_as_it_happened()
            self.pool.shutdown()

    def somewhere(self, where: str, do: Callable[[], Any]) -> Any:
        """Do it here, in a thread, or in a task of a loop in a thread."""
        if where == "here":
            return do()
        if where == "thread":
            return self.pool.submit(do).result()

        async def task() -> Any:
            return do()

        return self.pool.submit(lambda: asyncio.run(task())).result()

    places = st.sampled_from(["here", "thread", "here", "task"])

    @rule(target=episodes)
    @precondition(lambda self: len(self.living) < 4)
    def an_episode_starts(self) -> LiveEpisode:
        made = LiveEpisode(self.sink, Task(id=str(len(self.living)), input={}), workflow="w")
        self.living.append(made)
        return made

    @rule(target=episodes, outer=episodes)
    @precondition(lambda self: len(self.living) < 6)
    def an_episode_starts_inside_another(self, outer: LiveEpisode) -> LiveEpisode:
        made = Within(outer, self.sink, Task(id=str(len(self.living)), input={}), workflow="w")
        self.living.append(made)
        return made

    @rule(target=calls, episode=episodes, role=ROLES, texts=st.lists(TEXTS, min_size=1, max_size=4), where=places)
    def a_call_starts(self, episode: LiveEpisode, role: str, texts: list[str], where: str) -> Kept | None:
        messages = [
            {"role": "user" if (len(texts) - i) % 2 else "assistant", "content": t} for i, t in enumerate(texts)
        ]
        owners = [episode]
        while isinstance(owners[-1], Within):
            owners.append(owners[-1].outer)
        body = {"messages": messages, "model": "m", "temperature": 0.5}
        if owners[-1].ended:
            with pytest.raises(RecordError):
                self.somewhere(where, lambda: episode.start(CallerContext(role, "test"), body))
            return None
        call = self.somewhere(where, lambda: episode.start(CallerContext(role, "test"), body))
        assert call.episode is owners[-1]
        takes_part = [owner for owner in owners if not owner.ended]
        copies = {copy.episode.id: copy for copy in call.copies}
        ended = {k.call.id for k in self.kept if k.end is not None}
        found = None
        for owner in takes_part:
            its = call if owner is owners[-1] else copies.pop(owner.id)
            before = [k for k in self.kept if k.episode is owner]
            kept = Kept(its, owner, role, messages, len(before), sum(k.role == role for k in before))
            kept.ended_before = {*ended, *(c.id for k in self.kept if k.end is not None for c in k.call.copies)}
            self.kept.append(kept)
            found = kept if owner is owners[-1] else found
        assert copies == {}
        return found

    def ends(self, kept: Kept, status: str, answer: Answer | None) -> None:
        """The first end counts, for the call and for its copies."""
        for one in (kept, *(k for k in self.kept if k.call in kept.call.copies)):
            if one.end is None:
                one.end = (status, answer)

    @rule(kept=calls, texts=st.lists(TEXTS, min_size=1, max_size=3), prompt=TOKENS, data=st.data(), where=places)
    def a_call_is_answered(self, kept: Kept | None, texts: list[str], prompt: tuple[int, ...], data: Any, where: str):
        if kept is None:
            return
        answer = answer_of(texts, prompt, data.draw(st.integers(0, len(texts) - 1)))
        self.somewhere(where, lambda: kept.call.finish(answer))
        if kept.end is None:
            self.ends(kept, "ok", answer)

    @rule(kept=calls, status=st.sampled_from(STATUSES), part=st.none() | TEXTS, where=places)
    def a_call_fails(self, kept: Kept | None, status: str, part: str | None, where: str):
        if kept is None:
            return
        answer = None if part is None else answer_of([part], (1,))
        self.somewhere(where, lambda: kept.call.fail(status, "because", answer))
        if kept.end is None:
            self.ends(kept, status, answer)

    @rule(episode=episodes, status=st.sampled_from(["ok", "error", "cancelled"]), where=places)
    def an_episode_ends(self, episode: LiveEpisode, status: str, where: str):
        if episode.ended:
            return
        self.somewhere(where, lambda: episode.end(status, rewards={"team": 1.0}))
        self.done[episode.id] = status
        for kept in self.kept:
            if kept.episode is episode and kept.end is None:
                self.ends(kept, "cancelled", None)

    @invariant()
    def numbers_have_no_holes_and_nothing_follows_an_end(self) -> None:
        for episode in getattr(self, "living", ()):
            check_order(self.sink, episode)

    def everything_is_recorded_as_it_happened(self) -> None:
        stored = {c.id: c for c in self.sink.of(CallRecord)}
        bodies = {m.id: m.body for m in self.sink.of(Message)}
        rewards = {(r.target, r.name): r.value for r in self.sink.of(RewardRecord)}
        assert len(self.sink.of(CallRecord)) == len(stored) == len(self.kept)
        assert len(self.sink.of(Episode)) == len(self.living)
        for kept in self.kept:
            call = stored[kept.call.id]
            status, answer = kept.end or ("cancelled", None)
            assert (call.episode, call.role, call.step, call.turn) == (kept.episode.id, kept.role, kept.step, kept.turn)
            assert call.status == status
            assert [bodies[m] for m in call.messages] == kept.messages
            assert set(call.parents) <= kept.ended_before
            assert call.candidates == (answer.candidates if answer else ())
            assert call.chosen == (answer.chosen if answer else None)
            assert tokens_of(self.sink, call.prompt) == (answer.prompt_ids if answer else ())
            for i, components in enumerate(answer.rewards if answer else ()):
                assert rewards[f"{call.id}.{i}", "local"] == components["local"]


Recording.TestCase.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)
TestRecording = Recording.TestCase


# All at once: nothing orders the threads and tasks but the recorder itself

ENDS = st.sampled_from(["ok", "ok", *STATUSES, "twice", "never"])
SCRIPTS = st.lists(st.lists(st.tuples(ROLES, ENDS, TEXTS), max_size=6), min_size=2, max_size=6)


@settings(max_examples=20, deadline=None)
@given(SCRIPTS, st.integers(0, 12))
def test_threads_and_tasks_at_once(scripts, end_after):
    """Half of the scripts run in threads, half in tasks; the episode ends after some calls, whoever is still at it."""
    sink = Sink()
    episode = LiveEpisode(sink, Task(id="t", input={}), workflow="w")
    seen: list[tuple[LiveCall, str, str]] = []
    refused = Counter()
    enough = threading.Semaphore(0)

    def one(role: str, end: str, text: str) -> None:
        try:
            call = episode.start(CallerContext(role, "test"), {"messages": [{"role": "assistant", "content": text}]})
        except RecordError:
            refused["start"] += 1
            return
        finally:
            enough.release()
        seen.append((call, role, end))
        if end == "never":
            return
        if end in STATUSES:
            call.fail(end, "because")
        else:
            call.finish(answer_of([text], (1, 2)))
        if end == "twice":
            call.fail("error", "again")

    def in_thread(script) -> None:
        for step in script:
            one(*step)

    async def in_tasks() -> None:
        async def run(script) -> None:
            for step in script:
                await asyncio.sleep(0)
                one(*step)

        await asyncio.gather(*(run(script) for script in scripts[1::2]))

    def end() -> None:
        for _ in range(min(end_after, sum(map(len, scripts)))):
            enough.acquire()
        episode.end("ok", rewards={"team": 1.0})

    threads = [threading.Thread(target=in_thread, args=(script,)) for script in scripts[::2]]
    threads += [threading.Thread(target=lambda: asyncio.run(in_tasks())), threading.Thread(target=end)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check_order(sink, episode)
    stored = {c.id: c for c in sink.of(CallRecord)}
    assert stored.keys() == {call.id for call, _, _ in seen}
    assert len(seen) + refused["start"] == sum(map(len, scripts))
    for call, role, end_of_it in seen:
        allowed = {"cancelled"} if end_of_it == "never" else {"cancelled", "ok" if end_of_it == "twice" else end_of_it}
        assert stored[call.id].role == role
        assert stored[call.id].status in allowed
    assert isinstance(sink[-1], Episode)


def test_an_end_waits_for_a_call_that_is_being_written():
    """However slow the store: the episode's record comes after those of its calls."""
    writing, may_write = threading.Event(), threading.Event()

    class Slow(Sink):
        def write(self, records):
            if any(isinstance(r, CallRecord) for r in records):
                writing.set()
                may_write.wait(60)
            super().write(records)

    sink = Slow()
    episode = LiveEpisode(sink, Task(id="t", input={}), workflow="w")
    call = episode.start(CallerContext("a", "test"), {"messages": []})
    finishing = threading.Thread(target=call.finish, args=(answer_of(["x"], (1,)),))
    finishing.start()
    assert writing.wait(60)
    ending = threading.Thread(target=episode.end, args=("ok",))
    ending.start()
    ending.join(0.02)
    assert ending.is_alive()
    may_write.set()
    finishing.join()
    ending.join()
    assert [type(r).__name__ for r in sink if not isinstance(r, Message | Segment | RewardRecord)] == [
        "CallRecord",
        "Episode",
    ]


def test_a_call_does_not_read_what_was_said_after_it_started():
    sink = Sink()
    episode = LiveEpisode(sink, Task(id="t", input={}), workflow="w")
    few_shot = {"messages": [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "and?"}]}
    early = episode.start(CallerContext("a", "test"), few_shot)
    other = episode.start(CallerContext("b", "test"), {"messages": []})
    other.finish(answer_of(["yes"], (1,)))
    early.finish(answer_of(["no"], (1,)))
    episode.start(CallerContext("c", "test"), few_shot).finish(answer_of(["no"], (1,)))
    assert {c.role: c.parents for c in sink.of(CallRecord)} == {"a": (), "b": (), "c": (other.id,)}


def test_a_call_that_ends_while_the_recorder_is_at_work_on_the_same_thread():
    """As when the garbage collector closes a half-read stream in the middle of another call's start."""
    sink = Sink()
    episode = LiveEpisode(sink, Task(id="t", input={}), workflow="w")
    first = episode.start(CallerContext("a", "test"), {"messages": []})

    class Body(dict):
        def get(self, key, default=None):
            first.fail("cancelled", "the stream was closed")
            return super().get(key, default)

    episode.start(CallerContext("a", "test"), Body(messages=[])).finish(answer_of(["x"], (1,)))
    episode.end("ok")
    assert sorted((c.step, c.status) for c in sink.of(CallRecord)) == [(0, "cancelled"), (1, "ok")]
