"""Calls that a framework's model makes: which are opened, how they are answered or observed, and how they end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time

import pytest

from cotune.errors import RecordError, SamplerError
from cotune.recording.context import opened_call, recording
from cotune.recording.hooks import hooks
from cotune.recording.model_calls import answer_blocking, ask, ask_async, end_call, observed, open_call, step
from tests.integrations.recorded import Recorded, answer

BODY = {"messages": [{"role": "user", "content": "x"}]}


@pytest.fixture
def record() -> Recorded:
    return Recorded()


def unreadable() -> dict[str, object]:
    raise KeyError("messages")


def test_outside_an_episode_and_within_a_call_nothing_is_opened(record: Recorded) -> None:
    def run(task):
        with observed(open_call(lambda: BODY)):
            inner = open_call(unreadable)
        return {"team": 1, "metrics": {"inner": inner is not None}}

    assert open_call(unreadable) is None
    assert record(run).episode.metrics == {"inner": 0.0}
    assert record.statuses == ["cancelled"]


def test_a_request_that_cannot_be_read_passes_unrecorded_and_counted(record: Recorded) -> None:
    outcome = record(lambda task: open_call(unreadable) is None)
    assert outcome.live.warnings == {"unread_call": 1}
    assert record.calls == []


def test_a_scope_that_fails_costs_the_role_and_is_counted(record: Recorded, monkeypatch) -> None:
    def broken():
        raise RuntimeError("a framework changed")

    monkeypatch.setattr(hooks, "scope_finders", [broken])

    def run(task):
        call = open_call(lambda: BODY)
        end_call(call, "north", lambda value: answer(value))
        return 1

    outcome = record(run)
    assert outcome.live.warnings == {"unidentified_call": 1}
    assert [(call.role, call.status) for call in record.calls] == [("app", "ok")]


def test_a_call_after_the_end_passes_unrecorded_and_counted(record: Recorded) -> None:
    outcome = record(lambda task: 1)
    with recording(outcome.live):
        assert open_call(lambda: BODY) is None
    assert outcome.live.warnings == {"late_call": 1}


def test_a_call_whose_episode_stops_before_its_answer_is_begun_does_not_wait_for_it(record: Recorded) -> None:
    async def hangs(call: object) -> str:
        await asyncio.sleep(30)
        return "never"

    def run(task: object) -> int:
        call = open_call(lambda: BODY)
        assert call is not None
        call.episode.stop()
        with pytest.raises(concurrent.futures.CancelledError):
            answer_blocking(call)
        return 1

    began = time.monotonic()
    record(run, hangs)
    assert record.statuses == ["cancelled"]
    assert time.monotonic() - began < 20


def test_where_a_policy_would_answer_neither_passes(record: Recorded) -> None:
    def run(task):
        with pytest.raises(KeyError):
            open_call(unreadable)
        return 1

    outcome = record(run, lambda call: "x")
    with recording(outcome.live), pytest.raises(RecordError, match="has ended"):
        open_call(lambda: BODY)
    assert outcome.live.warnings == {}


def test_asking_ends_the_call_with_the_answer_or_the_error(record: Recorded) -> None:
    def reply(call):
        if call.step == 2:
            raise SamplerError("no room", "Make room.")
        return "x"

    async def asked(task):
        calls = [open_call(lambda: BODY) for _ in range(3)]
        found = await ask_async(calls[0]), await asyncio.to_thread(ask, calls[1])
        assert [one.candidates[0].text for one in found] == ["x", "x"]
        with pytest.raises(SamplerError):
            await ask_async(calls[2])
        return 1

    record(asked, reply)
    assert record.statuses == ["ok", "ok", "error"]
    assert record.calls[2].error == "SamplerError: no room Make room."


def test_without_a_responder_the_call_stays_open(record: Recorded) -> None:
    def run(task):
        call = open_call(lambda: BODY)
        assert ask(call) is None
        end_call(call, "said", answer)
        end_call(call, "twice", answer)
        return 1

    record(run)
    assert [c.text for call in record.calls for c in call.candidates] == ["said"]


def test_what_cannot_be_read_of_an_answer_is_malformed(record: Recorded) -> None:
    def run(task):
        end_call(open_call(lambda: BODY), None, lambda value: value.candidates)
        with pytest.raises(ConnectionError), observed(open_call(lambda: BODY)):
            raise ConnectionError("gone")
        return 1

    record(run)
    assert record.statuses == ["malformed", "error"]
    assert record.calls[1].error == "ConnectionError: gone"


def test_a_stream_has_its_call_open_only_while_it_makes_a_part(record: Recorded) -> None:
    seen: list[bool] = []

    def stream():
        seen.append(opened_call.get() is not None)
        yield "a"
        seen.append(opened_call.get() is not None)

    def run(task):
        call, source = open_call(lambda: BODY), stream()
        assert step(call, source) == "a"
        seen.append(opened_call.get() is not None)
        assert step(call, source) is None
        return 1

    record(run)
    assert seen == [True, False, True]
