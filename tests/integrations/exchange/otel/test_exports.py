"""Exports of Phoenix and Langfuse as records.

Forms: arize-phoenix-client 3.5.0 (`Span`, `get_spans_dataframe`), Phoenix's REST API (`/spans`, `/spans/otlpv1`);
langfuse 5.0.4 (`ObservationV2`, what its OpenAI and LangChain integrations write), Langfuse's download of a trace and
its reference of fields for exports to blob storage.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cotune.cli.main import main
from cotune.integrations.exchange.otel.importer import import_file
from cotune.integrations.exchange.otel.phoenix import nanoseconds
from cotune.integrations.exchange.otel.spans import Detail, episode_spans
from cotune.storage.sqlite_store import SqliteStore
from tests.integrations.exchange.otel.records import record

TRACE = "a1b2c3d4e5f6a1b2c3d4e5f6a1b2c3d4"
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALLED = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}}


class Read:
    """What a file becomes: episodes, calls, and the messages of each call."""

    def __init__(self, folder: Path, *values: Any, lines: bool = False) -> None:
        text = "\n".join(map(json.dumps, values)) if lines else json.dumps(values[0])
        (folder / "export.json").write_text(text)
        with SqliteStore.open(folder / "records.db") as store:
            self.made = import_file(folder / "export.json", store)
            store.flush()
            self.episodes = list(store.episodes())
            self.calls = [call for episode in self.episodes for call in store.calls(episode.id)]
            self.asked = [[store.message(name) for name in call.messages] for call in self.calls]
            targets = [target for e in self.episodes for target in (e.id, *(f"{c.id}.0" for c in store.calls(e.id)))]
            self.rewards = {target: dict(found) for target, found in store.rewards(targets).items() if found}
            self.feedback = {target: dict(found) for target, found in store.feedback(targets).items() if found}


def phoenix(id: int, parent: int | None, kind: str, name: str, attributes: dict[str, Any], **more: Any) -> Any:
    return {
        "id": f"U3Bhbjo{id}",
        "name": name,
        "context": {"trace_id": TRACE, "span_id": f"{id:016x}"},
        "span_kind": kind,
        "parent_id": None if parent is None else f"{parent:016x}",
        "start_time": f"2026-11-01T12:00:{id:02}+00:00",
        "end_time": f"2026-11-01T12:00:{id + 1:02}.500000+00:00",
        "status_code": "OK",
        "status_message": "",
        "attributes": {"openinference.span.kind": kind, **attributes},
        "events": [],
        **more,
    }


ASKED = {
    "llm.model_name": "gpt-4o-mini",
    "llm.invocation_parameters": '{"temperature": 0.3, "model": "gpt-4o-mini"}',
    "llm.input_messages.0.message.role": "system",
    "llm.input_messages.0.message.content": "Be short.",
    "llm.input_messages.1.message.role": "user",
    "llm.input_messages.1.message.content": "Weather in Rome?",
    "llm.output_messages.0.message.role": "assistant",
    "llm.output_messages.0.message.tool_calls.0.tool_call.id": "c1",
    "llm.output_messages.0.message.tool_calls.0.tool_call.function.name": "weather",
    "llm.output_messages.0.message.tool_calls.0.tool_call.function.arguments": '{"city":"Rome"}',
    "llm.tools.0.tool.json_schema": json.dumps(WEATHER),
    "llm.token_count.prompt": 21,
    "llm.token_count.completion": 7,
}
NESTED = {
    "llm": {
        "model_name": "gpt-4o-mini",
        "input_messages": [{"message": {"role": "tool", "content": "Sunny.", "tool_call_id": "c1"}}],
        "output_messages": [{"message": {"role": "assistant", "content": "Sunny."}}],
        "token_count": {"prompt": 30, "completion": 2},
    },
    "metadata": {"langgraph_node": "writer", "langgraph_step": 2},
}
SPANS = [
    phoenix(1, None, "CHAIN", "LangGraph", {"input.value": "Weather in Rome?"}),
    phoenix(2, 1, "AGENT", "planner", {"agent.name": "planner"}),
    phoenix(3, 2, "LLM", "ChatOpenAI", ASKED),
    phoenix(4, 1, "TOOL", "weather", {"tool.name": "weather"}),
    phoenix(5, 1, "LLM", "ChatOpenAI", NESTED, status_code="ERROR", status_message="RateLimitError"),
    phoenix(6, 1, "RETRIEVER", "docs", {}),
]


def check_phoenix(read: Read) -> None:
    assert [(e.workflow, e.calls, e.latency) for e in read.episodes] == [("LangGraph", 2, 5.5)]
    assert [(c.role, c.step, c.turn, c.status, c.model) for c in read.calls] == [
        ("planner", 0, 0, "ok", "gpt-4o-mini"),
        ("writer", 1, 0, "error", "gpt-4o-mini"),
    ]
    first, second = read.calls
    assert first.params == {"temperature": 0.3}
    assert (first.usage.prompt_tokens, first.usage.completion_tokens, first.latency) == (21, 7, 1.5)
    assert [m["content"] for m in read.asked[0]] == ["Be short.", "Weather in Rome?"]
    assert read.asked[1] == [{"role": "tool", "content": "Sunny.", "tool_call_id": "c1"}]
    assert first.candidates[0].tool_calls == [CALLED] and second.error == "RateLimitError"
    assert read.made.without_tokens == 2
    assert read.made.left_out == {"span:not_llm": 2}


def test_spans_of_phoenix_by_its_rest_api(tmp_path: Path) -> None:
    check_phoenix(Read(tmp_path, {"data": SPANS[::-1], "next_cursor": None}))


def test_spans_of_phoenix_as_lines_of_a_data_frame(tmp_path: Path) -> None:
    rows = []
    for span in SPANS:
        plain = {k: v for k, v in span.items() if k not in ("context", "attributes", "id")}
        ids = {f"context.{name}": value for name, value in span["context"].items()}
        columns = {
            f"attributes.{name}": value for name, value in {**dict.fromkeys(ASKED), **span["attributes"]}.items()
        }
        times = {k: nanoseconds(span[k]) // 1_000_000 for k in ("start_time", "end_time")}
        rows.append({**plain, **ids, **columns, **times})
    check_phoenix(Read(tmp_path, *rows, lines=True))


def test_spans_of_phoenix_in_the_form_of_otlp(tmp_path: Path) -> None:
    """`/spans/otlpv1`: single spans on a page, ids in base 64, names in snake case, values with all alternatives."""
    pairs = [
        {"key": key, "value": {"array_value": None, "int_value": value if isinstance(value, int) else None,
                               "string_value": value if isinstance(value, str) else None}}
        for key, value in {**ASKED, "openinference.span.kind": "LLM"}.items()
    ]  # fmt: skip
    span = {
        "trace_id": "obLD1OX2obLD1OX2obLD1A==",
        "span_id": "AAAAAAAAAAM=",
        "parent_span_id": None,
        "name": "ChatOpenAI",
        "start_time_unix_nano": 1793534403000000000,
        "end_time_unix_nano": 1793534404000000000,
        "attributes": pairs,
        "status": {"code": 1},
    }
    read = Read(tmp_path, {"data": [span], "next_cursor": None})
    assert [(c.role, c.model, c.latency) for c in read.calls] == [("app", "gpt-4o-mini", 1.0)]
    assert [m["content"] for m in read.asked[0]] == ["Be short.", "Weather in Rome?"]


def observation(id: str, parent: str | None, kind: str, second: int, **more: Any) -> dict[str, Any]:
    return {
        "id": id,
        "traceId": "trace-1",
        "parentObservationId": parent,
        "projectId": "p",
        "type": kind,
        "name": id,
        "startTime": f"2026-11-01T12:00:{second:02}.000Z",
        "endTime": f"2026-11-01T12:00:{second + 1:02}.000Z",
        "level": "DEFAULT",
        "statusMessage": None,
        "environment": "default",
        "metadata": {},
        **more,
    }


OBSERVATIONS = [
    observation("answer", "root", "GENERATION", 3, model="gpt-4o-mini", modelParameters={"temperature": 0.3},
                metadata={"langgraph_node": "writer", "ls_provider": "openai"},
                input=[{"role": "user", "content": "Weather in Rome?"}, {"role": "tool", "content": WEATHER},
                       {"role": "assistant", "content": "",
                        "tool_calls": [{"name": "weather", "args": {"city": "Rome"}, "id": "c1", "type": "tool_call"}]},
                       {"role": "tool", "content": "Sunny.", "tool_call_id": "c1"}],
                output={"role": "assistant", "content": "Sunny."}, usageDetails={"input": 30, "output": 2}),
    observation("root", None, "SPAN", 0, input={"question": "Weather in Rome?"}),
    observation("planner", "root", "AGENT", 1),
    observation("ask", "planner", "GENERATION", 2, model="gpt-4o-mini", level="ERROR", statusMessage="RateLimitError",
                input={"messages": [{"role": "user", "content": "Weather in Rome?"}], "tools": [WEATHER]}, output=None,
                usageDetails={}),
    observation("lookup", "root", "TOOL", 2),
    observation("search", "root", "RETRIEVER", 2),
]  # fmt: skip
SCORES = [
    {"id": "s1", "traceId": "trace-1", "name": "correct", "value": 1, "dataType": "BOOLEAN", "stringValue": "True",
     "timestamp": "2026-11-01T13:00:00.000Z"},
    {"id": "s2", "traceId": "trace-1", "observationId": "answer", "name": "tone", "value": 0.5, "dataType": "NUMERIC",
     "comment": "a little dry", "timestamp": "2026-11-01T13:00:00.000Z"},
    {"id": "s3", "traceId": "trace-1", "name": "kind", "value": "polite", "dataType": "CATEGORICAL",
     "timestamp": "2026-11-01T13:00:00.000Z"},
    {"id": "s4", "traceId": "trace-1", "name": "length", "value": "short", "dataType": "CATEGORICAL",
     "comment": "one word", "timestamp": "2026-11-01T13:00:00.000Z"},
]  # fmt: skip
ABOUT = {
    "id": "trace-1",
    "name": "weather-app",
    "timestamp": "2026-11-01T12:00:00.000Z",
    "input": {"question": "Rome?"},
    "output": "Sunny.",
}


def check_langfuse(read: Read, *, workflow: str, task: Any, rewards: bool) -> None:
    (episode,) = read.episodes
    assert (episode.workflow, episode.task.id, episode.task.input) == (workflow, "trace-1", task)
    assert (episode.status, episode.latency) == ("ok", 4.0)
    failed, answer = read.calls
    assert (failed.role, failed.status, failed.error) == ("planner", "error", "RateLimitError")
    assert (answer.role, answer.turn, answer.model, answer.params) == ("writer", 0, "gpt-4o-mini", {"temperature": 0.3})
    assert read.asked[1] == [
        {"role": "user", "content": "Weather in Rome?"},
        {"role": "assistant", "content": "", "tool_calls": [CALLED]},
        {"role": "tool", "content": "Sunny.", "tool_call_id": "c1"},
    ]
    assert answer.candidates[0].text == "Sunny." and answer.usage.completion_tokens == 2
    given = {episode.id: {"correct": 1.0}, f"{answer.id}.0": {"tone": 0.5}}
    assert read.rewards == (given if rewards else {})
    texts = {episode.id: {"length": "one word"}, f"{answer.id}.0": {"tone": "a little dry"}}
    assert read.feedback == (texts if rewards else {})
    assert read.made.without_tokens == 2
    assert read.made.left_out == {
        "span:span": 1,
        "span:retriever": 1,
        **({"evaluation_without_score": 2} if rewards else {}),
    }


@pytest.mark.parametrize("form", ["download", "api"])
def test_a_trace_of_langfuse_with_its_scores(tmp_path: Path, form: str) -> None:
    """Its page downloads `trace` and `observations`; its API has the observations in the trace."""
    trace = {**ABOUT, "scores": SCORES}
    whole = {**trace, "observations": OBSERVATIONS}
    read = Read(tmp_path, {"trace": trace, "observations": OBSERVATIONS} if form == "download" else whole)
    check_langfuse(read, workflow="weather-app", task={"question": "Rome?"}, rewards=True)


def test_a_page_of_observations_of_langfuse(tmp_path: Path) -> None:
    """`/api/public/v2/observations`: inputs and outputs as text, the model under `providedModelName`."""
    rows = [{**row, "providedModelName": row.get("model")} for row in OBSERVATIONS]
    for row in rows:
        row.pop("model", None)
        row |= {name: json.dumps(row[name]) for name in ("input", "output", "modelParameters") if row.get(name)}
    read = Read(tmp_path, {"data": rows, "meta": {"cursor": None}})
    check_langfuse(read, workflow="root", task={"question": "Weather in Rome?"}, rewards=False)


def test_observations_of_which_none_is_the_first_are_read_all_the_same(tmp_path: Path) -> None:
    rows = [{**row, "parentObservationId": row["id"]} for row in OBSERVATIONS]
    read = Read(tmp_path, {"data": rows, "meta": {"cursor": None}})
    assert OBSERVATIONS[0]["traceId"] in {episode.workflow for episode in read.episodes}
    assert read.made.calls == sum(row["type"] == "GENERATION" for row in OBSERVATIONS)


def test_lines_of_observations_in_snake_case(tmp_path: Path) -> None:
    """The export to blob storage: `trace_id`, times without a zone."""
    snake = {
        "traceId": "trace_id",
        "parentObservationId": "parent_observation_id",
        "startTime": "start_time",
        "endTime": "end_time",
        "modelParameters": "model_parameters",
        "usageDetails": "usage_details",
        "statusMessage": "status_message",
    }
    rows = [{snake.get(key, key): value for key, value in row.items()} for row in OBSERVATIONS]
    for row in rows:
        row["trace_name"] = "weather-app"
        row |= {name: row[name].replace("T", " ").replace(".000Z", ".000000") for name in ("start_time", "end_time")}
    read = Read(tmp_path, *rows, lines=True)
    check_langfuse(read, workflow="weather-app", task={"question": "Weather in Rome?"}, rewards=False)


def test_records_that_were_sent_to_langfuse_come_back(tmp_path: Path) -> None:
    """Langfuse keeps the attributes of what arrives over OTLP under `metadata.attributes`, all as text."""
    kinds = {"chat": "GENERATION", "invoke_agent": "AGENT", "execute_tool": "TOOL", "invoke_workflow": "SPAN"}
    with record(tmp_path / "a") as there:
        (episode,) = there.episodes()
        asked = [[there.message(name) for name in call.messages] for call in there.calls(episode.id)]
        before = there.calls(episode.id)
        places = [(call.id, call.role, call.step, call.turn) for call in before]
        spans = episode_spans(there, episode, Detail(content=True))
    rows = []
    for span in spans:
        messages = {
            "input": span.attributes.get("gen_ai.input.messages"),
            "output": span.attributes.get("gen_ai.output.messages"),
        }
        row = observation(span.id, span.parent, kinds[span.attributes["gen_ai.operation.name"]], 0, **messages)
        times = {name: f"2026-11-01T12:00:{i:02}.000Z" for i, name in enumerate(("startTime", "endTime"))}
        kept = {k: v if isinstance(v, str) else json.dumps(v) for k, v in span.attributes.items()}
        for name in ("gen_ai.input.messages", "gen_ai.output.messages"):
            kept.pop(name, None)
        rows.append({**row, **times, "traceId": span.trace, "metadata": {"attributes": kept}})
    read = Read(tmp_path, {"trace": {"id": spans[0].trace}, "observations": rows})
    assert [e.id for e in read.episodes] == [episode.id] and read.episodes[0].task.id == episode.task.id
    assert read.asked == asked
    assert [(c.id, c.role, c.step, c.turn) for c in read.calls] == places
    assert read.calls[0].candidates[0].message["role"] == "assistant"
    assert read.calls[0].params == {"temperature": 0.5, "stop": ["END"]}
    assert read.calls[0].candidates[0].finish_reason == "tool_calls"
    assert [call.chosen for call in read.calls] == [0, 1, 0, None]
    assert [call.streamed for call in read.calls] == [False, False, True, False]
    assert (read.episodes[0].rollout, read.episodes[0].metrics) == (2, {"success": 1.0})


def test_without_their_attributes_the_names_of_agents_are_the_roles(tmp_path: Path) -> None:
    """What Langfuse's ingestion version 4 leaves of a span of ours: its name, kind, messages and usage."""
    rows = [
        observation("w", None, "SPAN", 0, name="invoke_workflow solve"),
        observation("a", "w", "AGENT", 1, name="invoke_agent writer"),
        observation("c", "a", "GENERATION", 1, name="chat m", model="m", input=[{"role": "user", "content": "x"}]),
    ]
    read = Read(tmp_path, {"data": rows})
    assert [(call.role, call.model) for call in read.calls] == [("writer", "m")]


def test_the_command_says_what_the_export_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"trace": ABOUT, "observations": [*OBSERVATIONS, "obs-7"]}))
    assert main(["otel", "import", str(file), "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[:3] == [
        f"{file}: 1 episode with 2 calls from 7 spans",
        "2 of 2 calls have no token ids or log-probabilities: you can show, score and fine-tune on them, but not use "
        "them for a policy gradient",
        "left out: 1 observation_not_fetched, 1 span:retriever, 1 span:span",
    ]
    assert main(["otel", "import", str(file), "--out", str(tmp_path / "run")]) == 0
    assert main(["sft", str(tmp_path / "run"), "--out", str(tmp_path / "sft.jsonl")]) == 0
    (line,) = (tmp_path / "sft.jsonl").read_text().splitlines()
    assert json.loads(line)["messages"][-1] == {"role": "assistant", "content": "Sunny."}


def test_other_json_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text('[{"hello": 1}, 2]')
    assert main(["otel", "import", str(tmp_path / "x.json"), "--out", str(tmp_path / "run")]) == 1
    assert "observations of Langfuse" in capsys.readouterr().err
