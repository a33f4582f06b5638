"""Redactors: what is stored has been seen by them, and nothing else is stored."""

from __future__ import annotations

import logging

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotune.algorithms.collect import collect
from cotune.episodes.workflows import workflow, workflow_of
from cotune.errors import ConfigError, WorkflowError
from cotune.recording.call_records import CallerContext
from cotune.recording.recorder import LiveEpisode
from cotune.recording.redaction import FAILED, Redaction, each_text, load_redactor
from cotune.records.answers import Answer
from cotune.records.structs import CallRecord, Candidate, Episode, Message, PolicyRef, Segment, ShownToken, Task
from cotune.runtime import warn_once
from cotune.storage.sqlite_store import SqliteStore

SECRET = "4111-1111"
hide = each_text(lambda text: text.replace(SECRET, "[card]"))
MARK = CallerContext("a", "test")


class Sink(list):
    def write(self, records):
        self.extend(records)

    def of(self, kind):
        return [record for record in self if isinstance(record, kind)]


def live(*redactors, sink=None, **options) -> LiveEpisode:
    sink = Sink() if sink is None else sink
    task = Task(id="t", input={"card": SECRET})
    return LiveEpisode(sink, task, workflow="w", redactors=redactors or (hide,), **options)


def body(*texts, **options):
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)], **options}


def candidate(text="yes", ids=(9, 2), **message):
    message = {"role": "assistant", "content": text, **message}
    return Candidate(index=0, text=text or "", message=message, token_ids=ids, logprobs=(-0.5,) * len(ids))


def answer(*candidates, prompt=(5, 6), **options):
    return Answer(candidates=candidates or (candidate(),), prompt_ids=prompt, policy=PolicyRef("p", 1), **options)


def record_everything(episode: LiveEpisode) -> None:
    """Calls and an end that have the secret in every place where text can be."""
    function = {"name": "pay", "arguments": f'{{"card": "{SECRET}"}}'}
    tool = {"id": "1", "type": "function", "function": function}
    messages = [
        {"role": "system", "content": f"use {SECRET}"},
        {
            "role": "user",
            "content": [{"type": "text", "text": f"card {SECRET}"}, {"type": "image_url", "image_url": {}}],
        },
        {"role": "assistant", "content": None, "tool_calls": [tool]},
        {"role": "tool", "tool_call_id": "1", "content": f"paid with {SECRET}"},
    ]
    tools = [{"type": "function", "function": {"name": "pay", "description": f"like {SECRET}"}}]
    asked = {"messages": messages, "tools": tools, "model": "m", "metadata": {"note": SECRET}, "stop": [SECRET]}
    first = episode.start(MARK, asked)
    first.attempts.append(f"error: refused {SECRET}")
    said = candidate(f"raw {SECRET}", tool_calls=[tool])
    said = msgspec.structs.replace(said, message={**said.message, "content": f"clean {SECRET}"})
    first.finish(answer(said, sampling={"stop": [SECRET], "temperature": 1.0}, error=f"the scorer saw {SECRET}"))
    episode.start(MARK, asked).fail("error", f"BadRequestError: {SECRET}")
    part = answer(candidate(f"so far {SECRET}"))
    episode.start(MARK, asked).fail("cancelled", f"left at {SECRET}", part)
    episode.end("error", error=f"ValueError: {SECRET}")


def test_nothing_in_the_file_holds_what_was_hidden(tmp_path):
    with SqliteStore.open(tmp_path) as store:
        record_everything(live(sink=store))
    files = [file for file in tmp_path.iterdir() if file.is_file()]
    assert [file.name for file in files if SECRET.encode() in file.read_bytes()] == []
    with SqliteStore.open(tmp_path, read_only=True) as store:
        (episode,) = store.episodes()
        calls = store.calls(episode.id)
        assert episode.task.input == {"card": "[card]"}
        assert episode.error == "ValueError: [card]"
        assert [store.message(m)["content"] for m in calls[0].messages if m != calls[0].messages[1]] == [
            "use [card]", None, "paid with [card]",
        ]  # fmt: skip
        assert store.message(calls[0].tools)[0]["function"]["description"] == "like [card]"
        assert calls[0].params == {"metadata": {"note": "[card]"}, "stop": ["[card]"]}
        assert calls[0].sampling == {"stop": ["[card]"], "temperature": 1.0}
        assert calls[0].attempts == ("error: refused [card]",)
        assert [c.error for c in calls] == ["the scorer saw [card]", "BadRequestError: [card]", "left at [card]"]
        assert (calls[0].candidates[0].text, calls[0].candidates[0].message["content"]) == (
            "raw [card]",
            "clean [card]",
        )
        assert calls[0].candidates[0].tool_calls[0]["function"]["arguments"] == '{"card": "[card]"}'
        assert calls[2].candidates[0].text == "so far [card]"
        assert [c.redacted for c in calls] == [True] * 3


def test_the_application_and_scorers_see_everything_as_it_is():
    episode = live()
    asked = body(f"pay {SECRET}")
    call = episode.start(MARK, asked)
    said = candidate(f"paid {SECRET}")
    call.finish(answer(said))
    assert call.messages == [{"role": "user", "content": f"pay {SECRET}"}]
    assert said.message == {"role": "assistant", "content": f"paid {SECRET}"}
    assert call.task.input == {"card": SECRET}


def test_a_redactor_may_change_its_copy_and_sees_equal_messages_once():
    seen = []

    def blank(message):
        seen.append((message["role"], message["content"]))
        message["content"] = "-"
        return message

    episode = live(blank)
    first = episode.start(MARK, body("one"))
    first.finish(answer(candidate("two")))
    episode.start(MARK, body("one", "two", "three")).finish(answer(candidate("four")))
    episode.end("ok")
    assert seen == [
        ("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four"), ("task", {"card": SECRET}),
    ]  # fmt: skip
    assert first.messages == [{"role": "user", "content": "one"}]
    assert {m.body["content"] for m in episode.sink.of(Message)} == {"-"}


def test_redactors_apply_in_order():
    episode = live(each_text(lambda text: text + "1"), each_text(lambda text: text + "2"))
    episode.start(MARK, body("x")).finish(answer())
    assert [m.body["content"] for m in episode.sink.of(Message)] == ["x12"]


@pytest.mark.parametrize(
    "broken",
    [
        lambda message: message["nothing"],
        lambda message: None,
        lambda message: str(message),
        lambda message: {"role": "user", "content": object()},
    ],
    ids=["raises", "returns None", "returns a text", "returns what is no JSON"],
)
def test_a_redactor_that_fails_leaks_nothing_and_is_counted(broken, caplog, monkeypatch):
    warn_once._first_of.cache_clear()
    episode = live(broken)
    with caplog.at_level(logging.INFO):
        record_everything(episode)
    assert SECRET not in msgspec.json.encode(list(episode.sink)).decode()
    assert {m.body["content"] for m in episode.sink.of(Message) if isinstance(m.body, dict)} == {FAILED}
    assert episode.sink.of(Episode)[0].error == FAILED
    assert episode.sink.of(Episode)[0].task.input == FAILED
    assert {c.error for c in episode.sink.of(CallRecord)} == {FAILED}
    assert episode.warnings["redaction_failed"] >= 8
    assert caplog.records
    assert [r for r in caplog.records if SECRET in r.getMessage()] == []


def test_a_message_that_is_no_json_is_redacted_in_the_form_it_is_stored_in():
    class Card:
        def __repr__(self):
            return f"Card({SECRET})"

    episode = live()
    episode.start(MARK, {"messages": [{"role": "user", "content": [Card(), {SECRET}]}]}).finish(answer())
    assert [m.body for m in episode.sink.of(Message)] == [{"role": "user", "content": ["Card([card])", ["[card]"]]}]


def test_a_message_that_cannot_be_stored_is_not_shown_to_anyone():
    class Card:
        def __repr__(self):
            raise ValueError(SECRET)

    episode = live()
    episode.start(MARK, {"messages": [{"role": "user", "content": Card()}]}).finish(answer())
    assert [m.body for m in episode.sink.of(Message)] == [{"role": "user", "content": FAILED}]


def test_a_fault_of_the_recorder_leaks_nothing(monkeypatch):
    episode = live()

    def broken(*args):
        raise RuntimeError(SECRET)

    monkeypatch.setattr(episode._records._prompts, "add", broken)
    episode.start(MARK, body(SECRET, metadata={"x": SECRET})).finish(answer(candidate(SECRET)))
    (call,) = episode.sink.of(CallRecord)
    assert (call.status, call.error, call.params) == ("malformed", "not recorded: RuntimeError", {})
    assert SECRET not in msgspec.json.encode(list(episode.sink)).decode()


# Token ids


def turns(*, keep=False, second=("plain",)):
    """A redacted first prompt, one that goes on from it, and one of another role that shares nothing."""
    episode = live(keep_token_ids=keep)
    episode.start(MARK, body(f"pay {SECRET}")).finish(answer(candidate("ok", (9, 2)), prompt=(5, 6)))
    episode.start(MARK, body(*second)).finish(answer(candidate("fine", (8,)), prompt=(5, 6, 9, 2, 7)))
    episode.start(CallerContext("b", "test"), body("plain")).finish(answer(candidate("x", (4,)), prompt=(3,)))
    return episode


def test_token_ids_of_a_redacted_prompt_are_not_stored_nor_what_goes_on_from_it():
    episode = turns()
    assert [c.prompt is None for c in episode.sink.of(CallRecord)] == [True, True, False]
    assert [c.redacted for c in episode.sink.of(CallRecord)] == [True, True, False]
    assert [s.token_ids for s in episode.sink.of(Segment)] == [(3,)]
    assert [c.prompt_tokens for c in episode.sink.of(CallRecord)] == [2, 5, 1]
    assert episode.sink.of(CallRecord)[1].candidates[0].token_ids == (8,)


def test_token_ids_are_stored_on_request():
    episode = turns(keep=True)
    assert [c.prompt is None for c in episode.sink.of(CallRecord)] == [False] * 3
    assert [c.redacted for c in episode.sink.of(CallRecord)] == [True, False, False]
    assert [s.token_ids for s in episode.sink.of(Segment)] == [(5, 6), (9, 2), (7,), (3,)]
    assert episode.sink.of(Message)[0].body["content"] == "pay [card]"


@pytest.mark.parametrize(("keep", "ids"), [(False, ()), (True, (9, 2))])
def test_token_ids_of_a_redacted_candidate(keep, ids):
    episode = live(keep_token_ids=keep)
    episode.start(MARK, body("which card?")).finish(answer(candidate(SECRET), candidate("none", (4,))))
    (call,) = episode.sink.of(CallRecord)
    assert call.prompt is not None
    assert [c.token_ids for c in call.candidates] == [ids, (4,)]
    assert len(call.candidates[0].logprobs) == len(ids)


def test_tokens_are_not_stored_where_anything_of_their_call_was_hidden():
    said = msgspec.structs.replace(candidate("fine"), shown=(ShownToken("fine", -0.5),))
    episode = live()
    for text in (SECRET, "plain"):
        episode.start(MARK, body(text)).finish(answer(said))
    assert [c.candidates[0].shown for c in episode.sink.of(CallRecord)] == [None, said.shown]


def test_redacted_calls_are_left_out_of_training_with_the_reason(tmp_path):
    with SqliteStore.open(tmp_path) as store:
        for keep in (False, True):
            episode = live(sink=store, keep_token_ids=keep)
            episode.start(MARK, body(SECRET)).finish(answer(candidate("a")))
            episode.start(CallerContext("b", "test"), body("plain")).finish(answer(candidate(SECRET)))
            episode.end("ok", rewards={"team": 1.0})
        store.flush()
        collected = collect(store, store.episodes(), plan="independent")
    assert collected.left_out == {"redacted": 2}
    assert [s.role for s in collected.samples] == ["a", "b"]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.booleans(), min_size=1, max_size=3)), max_size=8))
def test_every_stored_segment_can_be_read_from_its_root(history):
    """Whatever prompts are redacted: no segment lies on one that is missing."""
    episode = live()
    path: dict[str, tuple[int, ...]] = {}
    for number, (name, secrets) in enumerate(history):
        path[name] = (*path.get(name, (ord(name),)), number)
        texts = [f"{i} {SECRET if secret else 'plain'}" for i, secret in enumerate(secrets)]
        call = episode.start(CallerContext(name, "test"), body(*texts))
        call.finish(answer(candidate("x", (100 + number,)), prompt=path[name]))
        path[name] = (*path[name], 100 + number)
    stored = {s.id: s for s in episode.sink.of(Segment)}
    for segment in stored.values():
        assert segment.parent is None or segment.parent in stored
    for call in episode.sink.of(CallRecord):
        assert call.prompt is None or call.prompt in stored


# Where redactors come from


def test_a_workflow_has_redactors():
    @workflow
    def solve(task):
        return 1.0

    assert solve.redactor(hide) is hide
    assert workflow_of(solve).redactors == [hide]
    more = workflow_of(solve).redacted("msgspec.structs:asdict", keep_token_ids=True)
    assert (more.redactors, more.keep_token_ids) == ([hide, msgspec.structs.asdict], True)
    assert workflow_of(solve).redactors == [hide]


async def not_plain(message): ...


@pytest.mark.parametrize("fn", [None, lambda: {}, lambda a, b: {}, not_plain])
def test_what_is_no_redactor(fn):
    with pytest.raises(WorkflowError, match="redactor"):
        workflow(lambda task: 1.0).redactor(fn)


@pytest.mark.parametrize("spec", ["nowhere:hide", "json:nothing", "plain", ":x", ""])
def test_a_redactor_that_cannot_be_loaded(spec):
    with pytest.raises(ConfigError, match=r"^redact = "):
        load_redactor(spec)


def test_a_redactor_of_a_file(tmp_path):
    (tmp_path / "private.py").write_text("def hide(message): return {'content': ''}")
    assert load_redactor(f"{tmp_path}/private.py:hide")({}) == {"content": ""}
    with pytest.raises(ConfigError, match=r"functions there: hide\. Did you mean .*private\.py:hide\?$"):
        load_redactor(f"{tmp_path}/private.py:hid")


FORM = {"type": "json_schema", "json_schema": {"name": "pay", "schema": {"enum": [SECRET, "cash"]}}}
LARK = f'start: "\\"{SECRET}\\"" | "\\"cash\\""'


def grammars(sink):
    """As they are stored, by call."""
    texts = {message.id: message.body for message in sink.of(Message)}
    return [texts[call.sampling["grammar"]] for call in sink.of(CallRecord)]


def only_the_form(message):
    """Sees the schema where the application put it, and knows nothing of grammars."""
    if message["role"] == "params" and "response_format" in message["content"]:
        message["content"]["response_format"] = "[form]"
    return message


def only_tools(message):
    return message | {"content": []} if message["role"] == "tools" else message


@pytest.mark.parametrize(
    ("redactor", "request_"),
    [
        (only_the_form, {"response_format": FORM}),
        (hide, {"response_format": FORM}),
        (only_tools, {"tools": [{"type": "function", "function": {"name": f"pay {SECRET}"}}]}),
        (hide, {"extra": "a grammar that holds it by another way"}),
    ],
)
@pytest.mark.parametrize("keep", [False, True])
def test_a_grammar_says_no_more_of_the_request_than_is_stored_of_it(redactor, request_, keep):
    sink = Sink()
    episode = live(redactor, sink=sink, keep_token_ids=keep)
    sampling = {"grammar": LARK, "temperature": 0.5}
    episode.start(MARK, body("pay", **request_)).finish(answer(candidate("cash"), sampling=sampling))
    (call,) = sink.of(CallRecord)
    (said,) = call.candidates
    assert call.redacted or keep
    assert grammars(sink) == [LARK if keep else "[redacted]"]
    assert {**call.sampling, "grammar": ""} == {"grammar": "", "temperature": 0.5}
    assert (said.token_ids, said.logprobs) == (((9, 2), (-0.5, -0.5)) if keep else ((), ()))


def test_a_grammar_of_a_request_that_no_redactor_changed_is_stored_with_the_ids():
    sink = Sink()
    asked = body(f"pay with {SECRET}", response_format={"type": "json_object"})
    live(only_the_form, hide, sink=sink).start(MARK, asked).finish(answer(sampling={"grammar": "start: JSON"}))
    plain = body("pay", stop=("x",))
    live(hide, sink=sink).start(MARK, plain).finish(answer(sampling={"grammar": "start: JSON", "stop": ("x",)}))
    assert grammars(sink) == ["[redacted]", "start: JSON"]
    assert [call.candidates[0].token_ids for call in sink.of(CallRecord)] == [(), (9, 2)]
    assert [call.redacted for call in sink.of(CallRecord)] == [True, False]


def test_the_id_of_a_task_that_is_its_text_is_never_none():
    task = Task(id=SECRET, input=SECRET)
    assert Redaction([hide]).task(task) == Task(id="[card]", input="[card]")
    dropped = Redaction([lambda message: {"role": message["role"]}])
    assert dropped.task(task) == Task(id="[redacted]", input=None)
    assert dropped.task(Task(id="t", input=SECRET)).id == "t"
