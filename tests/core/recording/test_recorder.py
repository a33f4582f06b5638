"""The recorder: what a call becomes in the record, whatever the order in which calls start and end."""

from __future__ import annotations

import asyncio
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotune.errors import RecordError
from cotune.recording.call_records import CallerContext, PromptTree
from cotune.recording.context import current_caller, identify
from cotune.recording.hooks import hooks
from cotune.recording.recorder import LiveEpisode
from cotune.recording.role import role
from cotune.records.answers import Answer
from cotune.records.ids import message_id, pack_ids, segment_id
from cotune.records.structs import (
    CallRecord,
    Candidate,
    Episode,
    Message,
    PolicyRef,
    RewardRecord,
    Segment,
    Task,
    Usage,
)
from cotune.runtime import warn_once


class Sink(list):
    def write(self, records):
        self.extend(records)

    def of(self, kind):
        return [record for record in self if isinstance(record, kind)]


def live(**options) -> LiveEpisode:
    return LiveEpisode(Sink(), Task(id="t", input={}), workflow="w", **options)


def candidate(index=0, text="yes", ids=(9,)) -> Candidate:
    message = {"role": "assistant", "content": text}
    return Candidate(index=index, text=text, message=message, token_ids=ids, logprobs=(-1.0,) * len(ids))


def answer(*candidates, **options) -> Answer:
    return Answer(candidates=candidates or (candidate(),), **options)


def body(*said: str, **options) -> dict:
    turns = [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(said)]
    return {"model": "m", "messages": turns, **options}


MARK = CallerContext("a", "test")


def test_a_call_with_everything():
    episode = live()
    tools = [{"type": "function", "function": {"name": "f"}}]
    call = episode.start(MARK, body("hi", tools=tools, temperature=0.5, stream=True))
    call.finish(
        answer(
            candidate(0, "no", (8,)),
            candidate(1, "yes", (9, 2)),
            chosen=1,
            prompt_ids=(5, 6),
            policy=PolicyRef("p", 2),
            usage=Usage(2, 3),
            rewards=({"local": 0.0}, {"local": 1.0, "style": 0.5}),
            sampling={"seed": 1},
        )
    )
    (record,) = episode.sink.of(CallRecord)
    user = {"role": "user", "content": "hi"}
    assert [(m.id, m.body) for m in episode.sink.of(Message)] == [
        (message_id(user), user),
        (message_id({"tools": tools}), tools),
    ]
    assert episode.sink.of(Segment) == [Segment(segment_id((5, 6)), None, pack_ids((5, 6)))]
    assert [(r.target, r.name, r.value) for r in episode.sink.of(RewardRecord)] == [
        (f"{call.id}.0", "local", 0.0),
        (f"{call.id}.1", "local", 1.0),
        (f"{call.id}.1", "style", 0.5),
    ]
    assert (record.role, record.step, record.turn, record.status, record.chosen) == ("a", 0, 0, "ok", 1)
    assert (record.model, record.params, record.sampling, record.streamed) == (
        "m", {"temperature": 0.5}, {"seed": 1}, True,
    )  # fmt: skip
    assert (record.messages, record.tools) == ((message_id(user),), message_id({"tools": tools}))
    assert (record.prompt, record.prompt_tokens, record.usage) == (segment_id((5, 6)), 2, Usage(2, 3))
    assert (record.policy, record.integration, record.parents) == (PolicyRef("p", 2), "test", ())


def test_messages_are_written_once_per_episode():
    episode = live()
    for said in (("a",), ("a", "b", "c"), ("a", "b", "c", "d", "e")):
        episode.start(MARK, body(*said)).finish(answer())
    assert [m.body["content"] for m in episode.sink.of(Message)] == ["a", "b", "c", "d", "e"]
    assert [len(c.messages) for c in episode.sink.of(CallRecord)] == [1, 3, 5]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=12), st.randoms(use_true_random=False))
def test_steps_and_turns_are_taken_at_the_start_and_every_call_ends_once(starts, random):
    """Any interleaving of starts and ends, with ends that come twice."""
    episode = live()
    open_calls, expected, turns = [], {}, {}
    for name, end_one in starts:
        call = episode.start(CallerContext(name, "test"), body(name))
        expected[call.id] = (name, len(expected), turns.setdefault(name, 0))
        turns[name] += 1
        open_calls.append(call)
        if end_one:
            ending = open_calls.pop(random.randrange(len(open_calls)))
            ending.finish(answer())
            ending.fail("error", "too late")
    record = episode.end("ok")
    calls = episode.sink.of(CallRecord)
    assert {c.id: (c.role, c.step, c.turn) for c in calls} == expected
    assert len(calls) == len(starts) == record.calls
    assert {c.id for c in calls if c.status == "cancelled"} == {c.id for c in open_calls}
    assert episode.failures == ({"cancelled": len(open_calls)} if open_calls else {})
    assert isinstance(episode.sink[-1], Episode)


def test_the_end_cancels_what_answers_open_calls_and_refuses_new_ones():
    episode = live()
    call = episode.start(MARK, body("x"))
    cancelled = []
    call.cancel_by(lambda: cancelled.append(call.id))
    episode.end("ok")
    assert cancelled == [call.id]
    with pytest.raises(RecordError, match="has ended"):
        episode.start(MARK, body("y"))


def test_work_that_begins_after_its_episode_was_stopped_is_cancelled_at_once():
    episode = live()
    call = episode.start(MARK, body("x"))
    episode.stop()
    cancelled = []
    call.cancel_by(lambda: cancelled.append("now"))
    assert cancelled == ["now"]


def test_work_of_a_call_that_was_answered_is_not_cancelled():
    episode = live()
    call = episode.start(MARK, body("x"))
    call.finish(answer())
    episode.stop()
    call.cancel_by(lambda: pytest.fail("the call was answered"))


def test_team_rewards_and_metrics():
    episode = live(phase="eval", training_step=3, rollout=2)
    record = episode.end("ok", rewards={"team": 1.0}, metrics={"success": 1.0})
    assert [(r.target, r.name, r.value) for r in episode.sink.of(RewardRecord)] == [(episode.id, "team", 1.0)]
    assert (record.phase, record.training_step, record.rollout, record.metrics) == ("eval", 3, 2, {"success": 1.0})


# Parents


def test_parents_by_the_frameworks_ids():
    episode = live()
    first = episode.start(CallerContext("a", "test", output="id-1"), body("q"))
    first.finish(answer(candidate(text="same")))
    second = episode.start(CallerContext("b", "test", output="id-2"), body("q"))
    second.finish(answer(candidate(text="same")))
    third = episode.start(CallerContext("c", "test", read=("id-1", "other")), body("q", "same", "r"))
    third.finish(answer())
    assert [c.parents for c in episode.sink.of(CallRecord)] == [(), (), (first.id,)]


def test_parents_by_what_was_said_whatever_fields_a_client_adds():
    episode = live()
    tool = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = {"role": "assistant", "content": None, "tool_calls": [tool], "refusal": None}
    first = episode.start(MARK, body("q"))
    first.finish(answer(Candidate(index=0, text="", message=said)))
    sent_back = {"role": "assistant", "content": "", "tool_calls": [{**tool, "index": 0}], "name": "a"}
    second = episode.start(MARK, {"messages": [{"role": "user", "content": "q"}, sent_back]})
    second.finish(answer())
    assert episode.sink.of(CallRecord)[1].parents == (first.id,)


def test_a_short_answer_in_a_history_is_the_roles_own_although_another_role_said_the_same():
    episode = live()
    for who, text in (("a", "2"), ("b", "2"), ("b", "3")):
        episode.start(CallerContext(who, "test"), body("q")).finish(answer(candidate(text=text)))
    episode.start(CallerContext("a", "test"), body("q", "2", "r")).finish(answer())
    episode.start(CallerContext("a", "test"), body("q", "3", "r")).finish(answer())
    first, _, third, *later = episode.sink.of(CallRecord)
    assert [c.parents for c in later] == [(first.id,), (third.id,)]


def test_failed_calls_are_nobodys_parent():
    episode = live()
    episode.start(CallerContext("a", "test", output="id-1"), body("q")).fail("error", "gone")
    episode.start(CallerContext("a", "test", read=("id-1",)), body("q")).finish(answer())
    assert [c.parents for c in episode.sink.of(CallRecord)] == [(), ()]


# Prompts as paths


def path_of(tip: str | None, segments: dict[str, Segment]) -> tuple[int, ...]:
    ids: tuple[int, ...] = ()
    while tip is not None:
        ids = segments[tip].token_ids + ids
        tip = segments[tip].parent
    return ids


@given(
    st.lists(
        st.tuples(
            st.sampled_from("ab"),
            st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple),
            st.lists(st.integers(0, 2), max_size=3).map(tuple),
        ),
        max_size=12,
    )
)
def test_every_prompt_can_be_read_back_and_equal_prompts_have_equal_ids(calls):
    tree = PromptTree()
    segments: dict[str, Segment] = {}
    for name, prompt, reply in calls:
        tip, new = tree.add(name, prompt, reply)
        segments |= {s.id: s for s in new}
        assert tip == segment_id(prompt)
        assert path_of(tip, segments) == prompt
    assert all(s.token_ids for s in segments.values())


def test_a_growing_prompt_stores_only_what_was_added_and_the_reply_it_goes_on_from():
    tree = PromptTree()
    tree.add("a", (1, 2), (3,))
    _, segments = tree.add("a", (1, 2, 3, 4, 5), (6,))
    assert [(s.parent, s.token_ids) for s in segments] == [
        (segment_id((1, 2)), (3,)),
        (segment_id((1, 2, 3)), (4, 5)),
    ]
    assert tree.add("a", (1, 2), (3,)) == (segment_id((1, 2)), [])


# Faults of the recorder's own


def test_a_sink_that_fails_is_counted_and_said_once(caplog: pytest.LogCaptureFixture, monkeypatch):
    class Full:
        def write(self, records):
            raise OSError("disk full")

    warn_once._first_of.cache_clear()
    with caplog.at_level(logging.WARNING, "cotune"):
        for _ in range(2):
            episode = LiveEpisode(Full(), Task(id="t", input={}), workflow="w")
            episode.start(MARK, body("x")).finish(answer())
            assert episode.end("ok").status == "ok"
            assert episode.warnings == {"lost": 2}
    assert [r.message for r in caplog.records] == ["The store refused 2 records. (OSError('disk full'))"]


def test_content_that_cannot_be_recorded_leaves_the_call():
    episode = live()
    call = episode.start(MARK, {"messages": [{"role": "user", "content": object()}]})
    call.finish(answer())
    (record,) = episode.sink.of(CallRecord)
    assert (record.id, record.status, record.messages) == (call.id, "malformed", ())
    assert "not recorded" in record.error
    assert episode.warnings == {"unrecorded": 1}


# Who is calling


def test_identity_override_then_mark_then_scope_then_app():
    from contextvars import copy_context

    def check():
        assert identify().role == "app"
        hooks.scope_finders.extend([lambda: None, lambda: CallerContext("scope", "s", state={"x": 1})])
        assert identify().role == "scope"
        mark = CallerContext("mark", "m", state={"y": 2}, read=("id",))
        current_caller.set(mark)
        assert identify() is mark
        with role("mine"):
            forced = identify()
            assert (forced.role, forced.state, forced.read) == ("mine", {"y": 2}, ("id",))
            with role("inner"):
                assert identify().role == "inner"
            assert identify().role == "mine"
        mark.done = True
        assert identify().role == "scope"

    kept = list(hooks.scope_finders)
    hooks.scope_finders.clear()
    try:
        copy_context().run(check)
    finally:
        hooks.scope_finders[:] = kept


def test_a_mark_ended_in_a_copied_context_is_ended_everywhere():
    async def main():
        mark = CallerContext("mark", "m")
        current_caller.set(mark)

        async def ends():
            current_caller.get().done = True

        await asyncio.create_task(ends())
        return identify().role

    assert asyncio.run(main()) != "mark"


def test_messages_that_are_equal_in_python_only_are_recorded_apart():
    """1, 1.0 and True are equal, and different JSON."""
    episode = live()
    for value in (1, True, 1.0):
        messages = [{"role": "user", "content": "go"}, {"role": "user", "content": [value]}]
        episode.start(MARK, {"model": "m", "messages": messages}).finish(answer())
    bodies = {message.id: message.body for message in episode.sink.of(Message)}
    calls = episode.sink.of(CallRecord)
    assert [repr(bodies[call.messages[1]]["content"]) for call in calls] == ["[1]", "[True]", "[1.0]"]
    assert len({call.messages[0] for call in calls}) == 1


def test_a_message_that_a_scorer_changes_is_not_taken_for_the_next_one():
    episode = live()
    for change in ("changed", None):
        call = episode.start(MARK, body("go"))
        if change:
            call.messages[0]["content"] = change
        call.finish(answer())
    bodies = {message.id: message.body for message in episode.sink.of(Message)}
    assert bodies[episode.sink.of(CallRecord)[1].messages[0]]["content"] == "go"
