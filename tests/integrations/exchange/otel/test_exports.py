"""The OTLP export of Phoenix as records: its REST API, `/v1/projects/PROJECT/spans/otlpv1`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cotune.cli.main import main
from cotune.integrations.exchange.otel.importer import import_file
from cotune.storage.sqlite_store import SqliteStore

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALLED = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}}

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
    (tmp_path / "export.json").write_text(json.dumps({"data": [span], "next_cursor": None}))
    with SqliteStore.open(tmp_path / "records.db") as store:
        imported = import_file(tmp_path / "export.json", store)
        store.flush()
        (episode,) = store.episodes()
        (call,) = store.calls(episode.id)
        asked = [store.message(name)["content"] for name in call.messages]
    assert (call.role, call.model, call.latency) == ("app", "gpt-4o-mini", 1.0)
    assert (call.usage.prompt_tokens, call.usage.completion_tokens) == (21, 7)
    assert call.params == {"temperature": 0.3}
    assert asked == ["Be short.", "Weather in Rome?"]
    assert call.candidates[0].tool_calls == [CALLED]
    assert (imported.without_tokens, imported.left_out) == (1, {})


def test_other_json_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text('[{"hello": 1}, 2]')
    assert main(["otel", "import", str(tmp_path / "x.json"), "--out", str(tmp_path / "run")]) == 1
    assert "holds no spans in OTLP/JSON" in capsys.readouterr().err
