"""Traces as records: what we exported comes back, and the conventions of other tools are read."""

from __future__ import annotations

import contextlib
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotune.cli.main import main
from cotune.errors import ConfigError
from cotune.integrations.exchange.otel.exporter import export_file
from cotune.integrations.exchange.otel.importer import Imported, import_file
from cotune.integrations.exchange.otel.messages import from_parts, to_parts
from cotune.integrations.exchange.otel.spans import Detail
from cotune.records.structs import CallRecord, Episode, PolicyRef, Usage
from cotune.storage.sqlite_store import SqliteStore
from tests.integrations.exchange.otel.records import TOOL, record, seen
from tests.mutations import as_json, mutated

MS = 1_000_000


def test_what_was_exported_comes_back(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with record(tmp_path / "a") as there:
        export_file(there, tmp_path / "spans.jsonl", detail=Detail(content=True, tokens=True))
        before = seen(there)
        (episode,) = there.episodes()
        calls = there.calls(episode.id)
        prompts = [there.token_ids(call.prompt) for call in calls if call.prompt]
        sampled = [(c.token_ids, c.logprobs) for call in calls for c in call.candidates]
        policies = [call.policy for call in calls]
    with SqliteStore.open(tmp_path / "b" / "records.db") as back:
        made = import_file(tmp_path / "spans.jsonl", back)
        import_file(tmp_path / "spans.jsonl", back)
        back.flush()
        assert made == Imported(spans=10, episodes=1, calls=4, without_tokens=2, left_out={})
        assert seen(back) == before
        (again,) = back.episodes()
        calls = back.calls(again.id)
        assert [back.token_ids(call.prompt) for call in calls if call.prompt] == prompts
        assert [(c.token_ids, c.logprobs) for call in calls for c in call.candidates] == sampled
        assert [call.policy for call in calls] == policies == [PolicyRef("writer", 3)] * 2 + [None] * 2
        assert calls[0].params == {"temperature": 0.5, "stop": ["END"]}
        assert calls[0].started == pytest.approx(again.started, abs=1)


def test_without_content_structure_and_numbers_come_back(tmp_path: Path) -> None:
    with record(tmp_path) as there:
        export_file(there, tmp_path / "spans.jsonl")
    with SqliteStore.open(tmp_path / "b" / "records.db") as back:
        made = import_file(tmp_path / "spans.jsonl", back)
        back.flush()
        (episode,) = back.episodes()
        calls = back.calls(episode.id)
        rewards = back.rewards([episode.id, f"{calls[1].id}.1"])
    assert made.left_out == {"call_without_messages": 4}
    assert [(c.role, c.step, c.turn, c.status) for c in calls] == [
        ("writer", 0, 0, "ok"),
        ("writer", 1, 1, "ok"),
        ("critic", 2, 0, "ok"),
        ("critic", 3, 1, "timeout"),
    ]
    assert calls[1].parents == (calls[0].id,) and calls[1].usage == Usage(6, 2)
    assert rewards == {episode.id: {"team": 0.5}, f"{calls[1].id}.1": {"local": 1.0}}
    assert (episode.task.id, episode.task.input, episode.metrics) == ("t1", None, {"success": 1.0})


def span(id: int, parent: int | None, name: str, attributes: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A span as a collector writes it; it starts `id` ms after the trace and takes 1 ms."""
    made = {
        "traceId": "ab" * 16,
        "spanId": f"{id:016x}",
        "name": name,
        "kind": 1,
        "startTimeUnixNano": str(1_700_000_000_000 * MS + id * MS),
        "endTimeUnixNano": str(1_700_000_000_000 * MS + (id + 1) * MS),
        "attributes": [{"key": k, "value": any_value(v)} for k, v in attributes.items()],
        "status": {},
        **more,
    }
    return made if parent is None else {**made, "parentSpanId": f"{parent:016x}"}


def any_value(value: Any) -> dict[str, Any]:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case str():
            return {"stringValue": value}
        case dict():
            return {"kvlistValue": {"values": [{"key": k, "value": any_value(v)} for k, v in value.items()]}}
    return {"arrayValue": {"values": [any_value(v) for v in value]}}


def event(name: str, attributes: dict[str, Any]) -> dict[str, Any]:
    pairs = [{"key": k, "value": any_value(v)} for k, v in attributes.items()]
    return {"name": name, "timeUnixNano": str(1_700_000_000_000 * MS), "attributes": pairs}


class Read:
    """What a file of these spans becomes."""

    def __init__(self, folder: Path, *spans: dict[str, Any], lines: list[str] | None = None) -> None:
        request = json.dumps({"resourceSpans": [{"scopeSpans": [{"scope": {"name": "x"}, "spans": list(spans)}]}]})
        (folder / "traces.jsonl").write_text("\n".join(lines if lines is not None else [request]))
        with SqliteStore.open(folder / "records.db") as store:
            self.made = import_file(folder / "traces.jsonl", store)
            store.flush()
            self.episodes: list[Episode] = list(store.episodes())
            self.calls: list[CallRecord] = [call for episode in self.episodes for call in store.calls(episode.id)]
            self.messages = [[store.message(name) for name in call.messages] for call in self.calls]
            self.tools = [store.message(call.tools) if call.tools else None for call in self.calls]


ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
CALLING = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"q":"x"}'}}],
}
TOLD = {"role": "tool", "tool_call_id": "c1", "content": "42"}

CONVENTIONS = {
    "gen_ai.operation.name": "chat",
    "gen_ai.request.model": "gpt",
    "gen_ai.request.max_tokens": 9,
    "gen_ai.usage.input_tokens": 5,
    "gen_ai.usage.output_tokens": 2,
    "gen_ai.response.finish_reasons": ["tool_call"],
}
PARTS_IN = [
    {"role": "user", "parts": [{"type": "text", "content": "Hi"}]},
    {"role": "assistant", "parts": [{"type": "tool_call", "id": "c1", "name": "look", "arguments": {"q": "x"}}]},
    {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "42"}]},
]
PARTS_OUT = [{"role": "assistant", "parts": [{"type": "text", "content": "42."}], "finish_reason": "stop"}]
SYSTEM = [{"type": "text", "content": "Be brief."}]


@pytest.mark.parametrize("form", ["text", "structured", "event"])
def test_messages_of_the_conventions(tmp_path: Path, form: str) -> None:
    def told(value: Any) -> Any:
        return json.dumps(value) if form == "text" else value

    content = {
        "gen_ai.system_instructions": told(SYSTEM),
        "gen_ai.input.messages": told(PARTS_IN),
        "gen_ai.output.messages": told(PARTS_OUT),
    }
    tools = {"gen_ai.tool.definitions": told([{"type": "function", "name": "look", "parameters": {"type": "object"}}])}
    if form == "event":
        events = [event("gen_ai.client.inference.operation.details", content)]
        chat = span(2, 1, "chat gpt", {**CONVENTIONS, **tools}, events=events)
    else:
        chat = span(2, 1, "chat gpt", {**CONVENTIONS, **tools, **content})
    agent = span(1, None, "invoke_agent a", {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "helper"})
    read = Read(tmp_path, agent, chat)
    assert read.messages == [[*ASKED, CALLING, TOLD]]
    assert read.tools == [[{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]]
    (call,) = read.calls
    assert (call.role, call.model, call.params, call.usage) == ("helper", "gpt", {"max_tokens": 9}, Usage(5, 2))
    assert [(c.text, c.finish_reason) for c in call.candidates] == [("42.", "stop")]
    assert call.integration == "opentelemetry" and read.made.left_out == {}


def test_spans_of_no_convention_are_counted(tmp_path: Path) -> None:
    other = {"my.prompt": "Hi"}
    read = Read(tmp_path, workflow(1, None, "w"), span(2, 1, "openai.chat", other), chat(3, 1, "a", "1"))
    assert read.messages == [[{"role": "user", "content": "a"}]]
    assert read.made.left_out == {"span:not_llm": 1}


def test_messages_of_openllmetry(tmp_path: Path) -> None:
    found = {
        "llm.request.type": "chat",
        "gen_ai.request.model": "gpt",
        "gen_ai.request.max_tokens": 9,
        "gen_ai.usage.prompt_tokens": 5,
        "gen_ai.usage.completion_tokens": 2,
        "gen_ai.prompt.0.role": "system",
        "gen_ai.prompt.0.content": "Be brief.",
        "gen_ai.prompt.1.role": "user",
        "gen_ai.prompt.1.content": "Hi",
        "gen_ai.prompt.2.role": "assistant",
        "gen_ai.prompt.2.tool_calls.0.id": "c1",
        "gen_ai.prompt.2.tool_calls.0.name": "look",
        "gen_ai.prompt.2.tool_calls.0.arguments": '{"q":"x"}',
        "gen_ai.prompt.3.role": "tool",
        "gen_ai.prompt.3.tool_call_id": "c1",
        "gen_ai.prompt.3.content": "42",
        "gen_ai.completion.0.role": "assistant",
        "gen_ai.completion.0.content": "42.",
        "gen_ai.completion.0.finish_reason": "length",
        "llm.request.functions.0.name": "look",
        "llm.request.functions.0.parameters": '{"type": "object"}',
    }
    team = span(1, None, "team.workflow", {"traceloop.span.kind": "workflow"})
    helper = span(2, 1, "helper.agent", {"traceloop.span.kind": "agent", "traceloop.entity.name": "helper"})
    read = Read(tmp_path, team, helper, span(3, 2, "openai.chat", found))
    assert read.messages == [[*ASKED, CALLING, TOLD]]
    assert read.tools == [[{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]]
    (call,) = read.calls
    assert (call.role, call.model, call.params, call.usage) == ("helper", "gpt", {"max_tokens": 9}, Usage(5, 2))
    assert [(c.text, c.finish_reason) for c in call.candidates] == [("42.", "length")]
    assert read.made.left_out == {}


def test_parts_of_openllmetry_are_parts_and_an_answer_in_json_is_a_text(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "Hi"}]
    found = {"llm.request.type": "chat", "gen_ai.prompt.0.role": "user"}
    said = {"gen_ai.completion.0.content": '{"a": 1}'}
    read = Read(tmp_path, span(1, None, "c", {**found, "gen_ai.prompt.0.content": json.dumps(parts), **said}))
    assert read.messages == [[{"role": "user", "content": parts}]]
    assert [c.text for c in read.calls[0].candidates] == ['{"a": 1}']
    (tmp_path / "cut").mkdir()
    read = Read(tmp_path / "cut", span(1, None, "c", {**found, "gen_ai.prompt.0.content": '[{"type": "te', **said}))
    assert (read.messages, read.calls[0].candidates) == ([[]], ())
    assert read.made.left_out == {"cut:gen_ai.prompt": 1, "call_without_messages": 1}


@pytest.mark.parametrize("form", ["json", "attributes"])
def test_messages_in_one_event_each(tmp_path: Path, form: str) -> None:
    said = {"role": "assistant", "content": "42."}
    bodies = [
        ("gen_ai.system.message", {"content": "Be brief."}),
        ("gen_ai.user.message", {"content": "Hi"}),
        ("gen_ai.assistant.message", {"tool_calls": CALLING["tool_calls"]}),
        ("gen_ai.tool.message", {"id": "c1", "content": "42"}),
        ("gen_ai.choice", {"index": 0, "finish_reason": "stop", "message": said}),
    ]
    events = [
        event(name, {"gen_ai.event.content": json.dumps(body)} if form == "json" else body) for name, body in bodies
    ]
    read = Read(tmp_path, span(1, None, "chat gpt", CONVENTIONS, events=events))
    assert read.messages == [[*ASKED, CALLING, TOLD]]
    assert [(c.text, c.finish_reason) for c in read.calls[0].candidates] == [("42.", "stop")]
    assert read.made.left_out == {}


def test_events_without_content_are_no_messages(tmp_path: Path) -> None:
    events = [event("gen_ai.user.message", {"role": "user"}), event("gen_ai.choice", {"message": {"content": "42."}})]
    read = Read(tmp_path, span(1, None, "chat gpt", CONVENTIONS, events=events))
    assert (read.messages, read.calls[0].candidates) == ([[]], ())
    assert read.made.left_out == {"call_without_messages": 1}


def test_messages_of_openinference(tmp_path: Path) -> None:
    start = "llm.input_messages"
    found = {
        "openinference.span.kind": "LLM",
        "llm.model_name": "gpt",
        "llm.invocation_parameters": '{"model": "gpt", "temperature": 0.2}',
        "llm.token_count.prompt": 5,
        "llm.token_count.completion": 2,
        f"{start}.0.message.role": "system",
        f"{start}.0.message.contents.0.message_content.type": "text",
        f"{start}.0.message.contents.0.message_content.text": "Be brief.",
        f"{start}.1.message.role": "user",
        f"{start}.1.message.content": "Hi",
        f"{start}.2.message.role": "assistant",
        f"{start}.2.message.tool_calls.0.tool_call.id": "c1",
        f"{start}.2.message.tool_calls.0.tool_call.function.name": "look",
        f"{start}.2.message.tool_calls.0.tool_call.function.arguments": '{"q":"x"}',
        f"{start}.3.message.role": "tool",
        f"{start}.3.message.tool_call_id": "c1",
        f"{start}.3.message.content": "42",
        "llm.output_messages.0.message.role": "assistant",
        "llm.output_messages.0.message.content": "42.",
        "llm.tools.0.tool.json_schema": json.dumps(TOOL),
        "metadata": '{"langgraph_node": "writer", "langgraph_step": 1}',
    }
    chain = span(1, None, "LangGraph", {"openinference.span.kind": "CHAIN"})
    read = Read(tmp_path, chain, span(2, 1, "ChatOpenAI", found))
    assert read.messages == [[*ASKED, CALLING, TOLD]]
    assert read.tools == [[TOOL]]
    assert (read.calls[0].role, read.calls[0].params, read.calls[0].usage) == (
        "writer",
        {"temperature": 0.2},
        Usage(5, 2),
    )
    assert read.made.left_out == {"span:not_llm": 1}


def chat(id: int, parent: int | None, asked: str, said: str, **more: Any) -> dict[str, Any]:
    found = {
        "gen_ai.operation.name": "chat",
        "gen_ai.input.messages": json.dumps([{"role": "user", "parts": [{"type": "text", "content": asked}]}]),
        "gen_ai.output.messages": json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": said}]}]),
        **more.pop("attributes", {}),
    }
    return span(id, parent, "chat m", found, **more)


def agent(id: int, parent: int | None, name: str) -> dict[str, Any]:
    return span(id, parent, name, {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": name})


def workflow(id: int, parent: int | None, name: str) -> dict[str, Any]:
    return span(id, parent, name, {"gen_ai.operation.name": "invoke_workflow", "gen_ai.workflow.name": name})


def test_the_nearest_agent_is_the_role_and_turns_count_by_role(tmp_path: Path) -> None:
    outer, inner = agent(1, None, "boss"), agent(3, 1, "hand")
    tool = span(4, 3, "execute_tool x", {"gen_ai.operation.name": "execute_tool"})
    spans = [chat(6, 1, "c", "3"), chat(2, 1, "a", "1"), outer, chat(5, 4, "b", "2"), inner, tool]
    read = Read(tmp_path, *spans)
    assert [(c.role, c.step, c.turn) for c in read.calls] == [("boss", 0, 0), ("hand", 1, 0), ("boss", 2, 1)]
    assert [c.candidates[0].text for c in read.calls] == ["1", "2", "3"]
    assert len(read.episodes) == 1


def test_workflows_within_a_trace_are_episodes_of_their_own(tmp_path: Path) -> None:
    server = span(1, None, "POST /run", {"http.request.method": "POST"})
    spans = [workflow(2, 1, "one"), chat(3, 2, "a", "1"), workflow(5, 1, "two"), chat(6, 5, "b", "2")]
    read = Read(tmp_path, server, *spans)
    assert [(e.workflow, e.calls) for e in read.episodes] == [("one", 1), ("two", 1)]
    assert [c.step for c in read.calls] == [0, 0]


def test_metrics_are_numbers_truth_values_or_words_for_them(tmp_path: Path) -> None:
    told = {"success": True, "a": "yes", "b": "No", "c": 2, "d": "hardly"}
    spans = [span(1, None, "w", {"gen_ai.operation.name": "invoke_workflow", "cotune.metrics": json.dumps(told)})]
    read = Read(tmp_path, *spans, chat(2, 1, "a", "1"))
    assert [e.metrics for e in read.episodes] == [{"success": 1.0, "a": 1.0, "b": 0.0, "c": 2.0}]
    assert read.made.left_out == {"metric_not_a_number": 1}


def test_answers_in_a_prompt_are_parents(tmp_path: Path) -> None:
    history = [
        {"role": "user", "parts": [{"type": "text", "content": "a"}]},
        {"role": "assistant", "parts": [{"type": "text", "content": "1"}]},
    ]
    second = chat(3, 1, "", "2", attributes={"gen_ai.input.messages": json.dumps(history)})
    read = Read(tmp_path, workflow(1, None, "w"), chat(2, 1, "a", "1"), second)
    assert read.calls[1].parents == (read.calls[0].id,)


@pytest.mark.parametrize(
    ("kind", "status"), [("openai.APITimeoutError", "timeout"), ("CancelledError", "cancelled"), ("500", "error")]
)
def test_failed_spans_are_failed_calls(tmp_path: Path, kind: str, status: str) -> None:
    failed = {"code": 2, "message": "no luck"}
    found = {"gen_ai.operation.name": "chat", "error.type": kind}
    read = Read(tmp_path, workflow(1, None, "w"), span(2, 1, "chat m", found, status=failed))
    assert (read.calls[0].status, read.calls[0].error) == (status, "no luck")


def test_spans_that_are_no_calls_are_counted(tmp_path: Path) -> None:
    embedding = span(2, 1, "embeddings e", {"gen_ai.operation.name": "embeddings"})
    unknown = chat(3, 1, "a", "1", attributes={"gen_ai.output.messages": json.dumps(["x"])})
    odd = json.dumps([{"role": "user", "parts": [{"type": "hologram"}, {"type": "text", "content": "a"}]}])
    parts = chat(4, 1, "a", "1", attributes={"gen_ai.input.messages": odd})
    read = Read(tmp_path, workflow(1, None, "w"), embedding, unknown, parts)
    assert read.made.left_out == {"span:embeddings": 1, "message_not_readable": 1, "part.hologram": 1}
    assert len(read.calls) == 2


def test_other_spellings_of_otlp_json_are_read(tmp_path: Path) -> None:
    attributes = [{"key": "gen_ai.operation.name", "value": {"string_value": "chat"}}]
    snake = {
        "trace_id": "q6urq6urq6urq6urq6urqw==",
        "span_id": "AAAAAAAAAAE=",
        "name": "chat m",
        "start_time_unix_nano": 5 * MS,
        "end_time_unix_nano": 6 * MS,
        "attributes": attributes,
        "status": {"code": "STATUS_CODE_ERROR"},
    }
    read = Read(tmp_path, lines=[json.dumps({"trace": {"trace_info": {}, "spans": [snake]}}), "not json", '{"a": 1}'])
    assert [(c.status, c.started) for c in read.calls] == [("error", 0.005)]
    assert read.made.left_out == {"line_not_json": 1, "not_otlp": 1, "call_without_messages": 1}
    assert read.episodes[0].task.id == "ab" * 16


def test_a_file_without_spans_is_refused(tmp_path: Path) -> None:
    with SqliteStore.open(tmp_path / "records.db") as store:
        with pytest.raises(ConfigError, match="a file of OTLP/JSON"):
            import_file(tmp_path / "none.json", store)
        (tmp_path / "empty.json").write_text('{"resourceSpans": []}')
        with pytest.raises(ConfigError, match="holds no spans"):
            import_file(tmp_path / "empty.json", store)


@pytest.mark.parametrize(
    ("wrong", "left_out"),
    [
        ({"gen_ai.usage.input_tokens": "many"}, 0),
        ({"llm.token_count.prompt": [1]}, 0),
        ({"cotune.attempts": 1 << 62}, 0),
        ({"cotune.rollout": "first"}, 0),
        ({"gen_ai.input.messages": '[{"role": "user", "parts": 5}]'}, 1),
        ({"cotune.prompt.token_ids": ["a"]}, 1),
        ({"cotune.candidates.sampled": '["a"]'}, 1),
    ],
)
def test_a_span_that_says_something_else_costs_no_other_call(
    tmp_path: Path, wrong: dict[str, Any], left_out: int
) -> None:
    sound = {**chat(3, 1, "b", "2"), "status": "fine"}
    read = Read(tmp_path, workflow(1, None, "w"), chat(2, 1, "a", "1", attributes=wrong), sound)
    assert [call.candidates[0].text for call in read.calls] == ["1", "2"][left_out:]
    assert read.made.calls == read.episodes[0].calls == 2 - left_out
    assert read.made.left_out == ({"call_not_readable": 1} if left_out else {})


@pytest.mark.parametrize("line", [b'{"a": "\xff"}', b"[" * 100_000])
def test_a_line_that_is_no_text_or_too_deep_is_left_out(tmp_path: Path, line: bytes) -> None:
    request = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [chat(1, None, "a", "1")]}]}]}).encode()
    (tmp_path / "t.jsonl").write_bytes(request + b"\n" + line)
    with SqliteStore.open(tmp_path / "records.db") as store:
        assert import_file(tmp_path / "t.jsonl", store).left_out == {"line_not_json": 1}


def test_a_cycle_of_parents_ends(tmp_path: Path) -> None:
    read = Read(tmp_path, chat(1, 2, "a", "1"), agent(2, 1, "x"))
    assert [c.role for c in read.calls] == ["x"]


def test_imported_traces_can_be_shown_and_used_for_fine_tuning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spans = [workflow(1, None, "w"), chat(2, 1, "a", "1"), embedding_span()]
    request = {"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}
    (tmp_path / "t.json").write_text(json.dumps(request, indent=2))
    run = str(tmp_path / "run")
    assert main(["otel", "import", str(tmp_path / "t.json"), "--out", run]) == 0
    said = capsys.readouterr().out
    assert "1 episode with 1 call from 3 spans" in said and "left out: 1 span:embeddings" in said
    assert main(["show", run]) == 0
    assert "app" in capsys.readouterr().out
    assert main(["records", "sft", run, "--out", str(tmp_path / "sft.jsonl")]) == 0
    assert json.loads((tmp_path / "sft.jsonl").read_text()) == {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "1"}]
    }


def embedding_span() -> dict[str, Any]:
    return span(9, 1, "embeddings e", {"gen_ai.operation.name": "embeddings"})


TEXTS = st.text(max_size=12)
JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS, lambda c: st.dictionaries(TEXTS, c), max_leaves=4
)
CALLS = st.builds(
    lambda id, name, arguments: {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}},
    TEXTS,
    TEXTS,
    TEXTS | st.dictionaries(TEXTS, JSONS).map(json.dumps),
)
ASKING = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user"]), "content": TEXTS}, optional={"name": st.just("n")}
)
SAYING = st.fixed_dictionaries({"role": st.just("assistant"), "content": TEXTS})
USING = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": TEXTS | st.none(), "tool_calls": st.lists(CALLS, min_size=1)}
)
TELLING = st.fixed_dictionaries({"role": st.just("tool"), "tool_call_id": TEXTS, "content": TEXTS})
MESSAGES = st.one_of(ASKING, SAYING, USING, TELLING)


@given(MESSAGES)
def test_messages_survive_the_conventions_form(message: dict[str, Any]) -> None:
    left_out: Counter[str] = Counter()
    there = json.loads(json.dumps(to_parts(message, left_out)))
    assert from_parts(there, left_out) == [message]
    assert left_out == {}


@pytest.mark.parametrize("count", [40, pytest.param(2000, marks=pytest.mark.long)])
def test_odd_spans_are_read_or_counted(tmp_path: Path, count: int) -> None:
    (tmp_path / "a").mkdir()
    with record(tmp_path / "a") as there:
        export_file(there, tmp_path / "spans.jsonl", detail=Detail(content=True, tokens=True))
    (whole,) = [json.loads(line) for line in (tmp_path / "spans.jsonl").read_bytes().splitlines()]
    rng = random.Random(7)
    with SqliteStore.open(tmp_path / "b" / "records.db") as back:
        for _ in range(count):
            (tmp_path / "odd.json").write_bytes(as_json(mutated(rng, whole)))
            with contextlib.suppress(ConfigError):
                import_file(tmp_path / "odd.json", back)


@pytest.mark.parametrize("odd", ["x", [1], {"a": 1}, 1.5])
def test_a_step_that_is_no_number_sorts_first(tmp_path: Path, odd: Any) -> None:
    about = {"gen_ai.operation.name": "chat"}
    chats = [span(1, 0, "chat m", {**about, "cotune.step": 1}), span(2, 0, "chat m", {**about, "cotune.step": odd})]
    assert Read(tmp_path, span(0, None, "run", {}), *chats).made.calls == 2


def chat_span(start: int = 1, end: int = 2, **attributes: str) -> dict[str, Any]:
    """A call without any span around it; the attributes are texts."""
    given = {"gen_ai.operation.name": "chat", **{name.replace("__", "."): value for name, value in attributes.items()}}
    return {
        "traceId": "1" * 32,
        "spanId": "1" * 16,
        "name": "chat m",
        "startTimeUnixNano": str(1_700_000_000_000_000_000 + start * 1_000_000_000),
        "endTimeUnixNano": str(1_700_000_000_000_000_000 + end * 1_000_000_000),
        "attributes": [{"key": key, "value": {"stringValue": value}} for key, value in given.items()],
    }


def imported(tmp_path: Path, span: dict[str, Any]) -> tuple[CallRecord, list[Any], dict[str, int]]:
    """The call of a span as it is read from a store, its messages, and what was left out."""
    file = tmp_path / "spans.jsonl"
    file.write_text(json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}))
    with SqliteStore.open(tmp_path / "records.db") as store:
        told = import_file(file, store)
        store.flush()
        [episode] = store.episodes()
        [call] = store.calls(episode.id)
        return call, [store.message(name) for name in call.messages], dict(told.left_out)


def whole_message(role: str, text: str) -> str:
    return json.dumps([{"role": role, "parts": [{"type": "text", "content": text}]}])


PROMPT, ANSWER = whole_message("user", "hello " * 100), whole_message("assistant", "yes " * 100)


@pytest.mark.parametrize("length", [1, 2, 3, 20, 128, 300])
def test_a_prompt_that_was_cut_takes_its_answer_with_it(tmp_path: Path, length: int) -> None:
    span = chat_span(gen_ai__input__messages=PROMPT[:length], gen_ai__output__messages=ANSWER)
    call, messages, left_out = imported(tmp_path, span)
    assert (messages, call.candidates) == ([], ())
    assert left_out == {"cut:gen_ai.input.messages": 1, "call_without_messages": 1}


def test_a_system_text_that_was_cut_takes_prompt_and_answer_with_it(tmp_path: Path) -> None:
    system = json.dumps([{"type": "text", "content": "be brief " * 100}])[:128]
    span = chat_span(
        gen_ai__system_instructions=system, gen_ai__input__messages=PROMPT, gen_ai__output__messages=ANSWER
    )
    call, messages, left_out = imported(tmp_path, span)
    assert (messages, call.candidates) == ([], ())
    assert left_out == {"cut:gen_ai.system_instructions": 1, "call_without_messages": 1}


def test_an_answer_or_tools_that_were_cut_are_left_out(tmp_path: Path) -> None:
    tools = json.dumps([{"type": "function", "name": "add", "description": "d" * 200}])
    span = chat_span(
        gen_ai__input__messages=PROMPT, gen_ai__output__messages=ANSWER[:128], gen_ai__tool__definitions=tools[:128]
    )
    call, messages, left_out = imported(tmp_path, span)
    assert (len(messages), call.candidates, call.tools) == (1, (), None)
    assert left_out == {"cut:gen_ai.output.messages": 1, "cut:gen_ai.tool.definitions": 1}


@pytest.mark.parametrize("text", ["hello", "[INST] hello [/INST]", "{name}, hello", "12:30"])
def test_a_plain_text_is_one_message(tmp_path: Path, text: str) -> None:
    _, messages, left_out = imported(tmp_path, chat_span(gen_ai__input__messages=text))
    assert (messages, left_out) == ([{"role": "user", "content": text}], {})


def test_a_span_that_ends_before_it_starts_is_readable(tmp_path: Path) -> None:
    call, _, left_out = imported(tmp_path, chat_span(5, 1, gen_ai__input__messages=PROMPT))
    assert (call.latency, left_out) == (0.0, {"negative_latency": 1})


def test_a_byte_order_mark_is_no_part_of_the_file(tmp_path: Path) -> None:
    line = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [chat_span(gen_ai__input__messages=PROMPT)]}]}]})
    for name, text in (("value", line), ("lines", f"{line}\r\n{line}\r\n")):
        file = tmp_path / name
        file.write_bytes(b"\xef\xbb\xbf" + text.encode())
        with SqliteStore.open(tmp_path / f"{name}.db") as store:
            told = import_file(file, store)
        assert (told.calls, dict(told.left_out)) == (1 + (name == "lines"), {})
