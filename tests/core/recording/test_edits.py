"""Edited prompts in records: what was asked and what was sent, each message once, redacted alike."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cotune.prompts.edits import Prompts
from cotune.recording.call_records import CallerContext
from cotune.recording.edits import keep_own_format
from cotune.recording.recorder import LiveCall, LiveEpisode
from cotune.records.structs import CallRecord, Episode, Message, Segment, Task
from cotune.storage.open_store import open_store
from tests.core.recording.test_redaction import SECRET, Sink, answer, hide
from tests.integrations.edits import NEW, OLD, part, prompts

TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {}}}]


def live(given: Prompts | None, *redactors: Any, sink: Any = None) -> LiveEpisode:
    sink = Sink() if sink is None else sink
    return LiveEpisode(sink, Task(id="t", input=1), workflow="w", redactors=redactors, prompts=given)


def ask(episode: LiveEpisode, *texts: str, **more: Any) -> LiveCall:
    roles = ("system", "user", "assistant", "user")
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    call = episode.start(CallerContext("app", "test"), {"model": "m", "messages": messages, **more})
    call.finish(answer())
    return call


def test_asked_and_sent_share_what_is_the_same() -> None:
    episode = live(prompts())
    ask(episode, OLD, "hello")
    ask(episode, OLD, "hello", "yes", "more")
    episode.end("ok")
    sink: Any = episode.sink
    first, second = sink.of(CallRecord)
    bodies = {message.id: message.body["content"] for message in sink.of(Message)}
    assert [bodies[name] for name in second.messages] == [OLD, "hello", "yes", "more"]
    assert [bodies[name] for name in second.messages_out] == [NEW, "hello", "yes", "more"]
    assert (second.sent[0], second.sent[1:]) == (first.sent[0], second.messages[1:])
    assert len(sink.of(Message)) == len(bodies) == 5
    assert first.prompts == second.prompts == sink.of(Episode)[0].prompts == prompts().id
    assert (first.edited, first.sent_tools, first.unedited) == (True, None, "")


def test_tools_and_schema() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "out", "schema": {"description": "What."}}}
    told = prompts(part("Looks.", "Sees.", kind="tool", key="look"), part("What.", "Why.", kind="format", key="out/"))
    episode = live(told)
    call = ask(episode, OLD, "hello", tools=TOOLS, response_format=form)
    sink: Any = episode.sink
    (record,) = sink.of(CallRecord)
    bodies = {message.id: message.body for message in sink.of(Message)}
    assert (record.sent, record.messages_out) == ((), record.messages)
    assert bodies[record.tools or ""][0]["function"]["description"] == "Looks."
    assert bodies[record.sent_tools or ""][0]["function"]["description"] == "Sees."
    assert bodies[record.sent_format or ""]["json_schema"]["schema"] == {"description": "Why."}
    assert (record.params["response_format"], call.params["response_format"]) == (form, form)
    assert TOOLS[0]["function"]["description"] == "Looks."


@pytest.mark.parametrize("given", [None, prompts(part(OLD, OLD))])
def test_nothing_is_said_where_nothing_is_edited(given: Prompts | None) -> None:
    episode = live(given)
    assert episode.prompting is None  # so caches of the application are used as ever
    ask(episode, OLD, "hello")
    episode.end("ok")
    sink: Any = episode.sink
    (record,) = sink.of(CallRecord)
    assert (record.prompts, record.sent, record.edited, sink.of(Episode)[0].prompts) == ("", (), False, "")


@pytest.mark.parametrize(
    ("text", "why", "said"),
    [
        ("You are terse. Never smile.", "prompt_unmatched", "app.system differs from character 22 on"),
        ("a -- b -- c", "prompt_ambiguous", "app.system can be read in several ways"),
    ],
)
def test_a_text_that_is_not_as_known(text: str, why: str, said: str) -> None:
    ways = prompts(part([1, " -- ", 2], ["new ", 1, 2])) if why == "prompt_ambiguous" else prompts()
    episode = live(ways)
    ask(episode, text, "hello")
    sink: Any = episode.sink
    (record,) = sink.of(CallRecord)
    assert (record.unedited, record.prompts, record.edited) == (why, ways.id, False)
    assert episode.warnings == {why: 1}
    assert said in episode.explained[why]


@pytest.mark.parametrize("more", [(), (part(OLD, NEW),)])
def test_a_schema_that_is_given_as_a_class(more: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "out", "schema": {"description": "What."}}}
    episode = live(prompts(part("What.", "Why.", kind="format", key="out/"), *more))
    body = {"model": "m", "messages": [{"role": "system", "content": OLD}], "response_format": form}
    call = episode.start(CallerContext("app", "test"), body)
    keep_own_format(call, episode.warn)
    call.finish(answer())
    sink: Any = episode.sink
    (record,) = sink.of(CallRecord)
    assert (record.sent_format, record.edited) == (None, bool(more))
    assert record.unedited == ("" if more else "prompt_unmatched")
    assert episode.warnings == {"prompt_unmatched": 1}


def test_a_fault_of_an_edit_costs_the_edit_and_not_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr("cotune.recording.edits.rewrite_chat", broken)
    episode = live(prompts())
    ask(episode, OLD, "hello")
    sink: Any = episode.sink
    assert [(call.status, call.unedited) for call in sink.of(CallRecord)] == [("ok", "prompt_unmatched")]


def test_redactors_see_what_was_sent() -> None:
    episode = live(prompts(part(OLD, f"Pay with {SECRET}.")), hide)
    ask(episode, OLD, "hello")
    sink: Any = episode.sink
    (record,) = sink.of(CallRecord)
    bodies = {message.id: message.body for message in sink.of(Message)}
    assert bodies[record.sent[0]]["content"] == "Pay with [card]."
    assert bodies[record.messages[0]]["content"] == OLD
    assert record.redacted
    assert (record.prompt, sink.of(Segment)) == (None, []), "token ids of a redacted text say it too"
    assert SECRET not in str(list(sink))


def test_a_store_keeps_them_and_reads_records_without(tmp_path: Any) -> None:
    with open_store(tmp_path / "records.db") as store:
        episode = live(prompts(), sink=store)
        ask(episode, OLD, "hello")
        episode.end("ok")
        store.flush()
        (call,) = store.calls(episode.id)
        assert [store.message(name)["content"] for name in call.messages_out] == [NEW, "hello"]
    old = msgspec.json.decode(msgspec.json.encode(call))
    for name in ("prompts", "sent", "sent_tools", "sent_format", "unedited"):
        del old[name]
    read = msgspec.convert(old, CallRecord)
    assert (read.messages, read.sent, read.prompts) == (call.messages, (), "")
