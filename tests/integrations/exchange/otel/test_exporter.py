"""Records as spans: their tree, what they hold by default, and where they go."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_core.tools import FunctionTool
from opentelemetry import trace
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import cotune
from cotune.cli.main import main
from cotune.episodes.rollout import EpisodeBatch, rollout
from cotune.episodes.workflows import workflow_of
from cotune.errors import ConfigError, CotuneError
from cotune.integrations.exchange.otel import names
from cotune.integrations.exchange.otel.exporter import LiveExport, export_file, export_to, otlp_exporter
from cotune.integrations.exchange.otel.spans import Detail, Span, episode_spans
from cotune.recording.call_records import CallerContext
from cotune.recording.recorder import LiveEpisode
from cotune.records.answers import Answer
from cotune.records.structs import Candidate, Task
from cotune.storage.sqlite_store import SqliteStore
from tests.integrations.autogen_models import autogen_client
from tests.integrations.exchange.otel.records import SECRET, record
from tests.integrations.provider import Provider
from tests.integrations.recorded import Responder, asks, tool_call


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with record(tmp_path) as made:
        yield made


def spans_of(store: SqliteStore, **detail: bool) -> list[Span]:
    (episode,) = store.episodes()
    return episode_spans(store, episode, Detail(**detail))


def test_workflow_agents_calls_and_tools_stand_in_a_tree(store: SqliteStore) -> None:
    spans = spans_of(store)
    by_id = {span.id: span for span in spans}
    tree = [(span.name, by_id[span.parent].name if span.parent else None, span.kind) for span in spans]
    assert tree == [
        ("invoke_workflow solve", None, "internal"),
        ("invoke_agent writer", "invoke_workflow solve", "internal"),
        ("chat m", "invoke_agent writer", "client"),
        ("execute_tool look", "invoke_agent writer", "internal"),
        ("invoke_agent writer", "invoke_workflow solve", "internal"),
        ("chat m", "invoke_agent writer", "client"),
        ("invoke_agent critic", "invoke_workflow solve", "internal"),
        ("chat other", "invoke_agent critic", "client"),
        ("invoke_agent critic", "invoke_workflow solve", "internal"),
        ("chat other", "invoke_agent critic", "client"),
    ]
    assert len({span.trace for span in spans}) == 1 and len(by_id) == len(spans)
    assert all(span.start <= span.end for span in spans)
    for span in spans[1:]:
        parent = by_id[span.parent or ""]
        assert parent.start <= span.start and span.end <= parent.end + 1_000_000, span.name


def test_times_are_those_of_the_records(store: SqliteStore) -> None:
    (episode,) = store.episodes()
    call = store.calls(episode.id)[0]
    chat = spans_of(store)[2]
    assert chat.start == pytest.approx(call.started * 1e9, abs=1000)
    assert chat.end - chat.start == pytest.approx(call.latency * 1e9, abs=2000)


def test_a_call_says_what_it_asked_and_got(store: SqliteStore) -> None:
    chats = [span for span in spans_of(store) if span.name.startswith("chat")]
    first, second, third, fourth = (span.attributes for span in chats)
    assert first["gen_ai.operation.name"] == "chat"
    assert (first["gen_ai.request.model"], first["gen_ai.request.temperature"]) == ("m", 0.5)
    assert first["gen_ai.request.stop_sequences"] == ["END"]
    assert (first["gen_ai.usage.input_tokens"], first["gen_ai.usage.output_tokens"]) == (3, 2)
    assert first["gen_ai.response.finish_reasons"] == ["tool_calls"]
    assert (first["gen_ai.agent.name"], first["cotune.step"], first["cotune.turn"]) == ("writer", 0, 0)
    assert (second["cotune.candidates"], second["cotune.chosen"]) == (2, 1)
    assert third["gen_ai.request.stream"] is True and third["cotune.attempts"] == 1
    assert fourth["error.type"] == "timeout" and chats[3].failed == "timeout"
    assert second["cotune.parents"] == [first["cotune.call.id"]]
    assert chats[1].links == (chats[0].id,)


def test_rewards_are_evaluations(store: SqliteStore) -> None:
    spans = spans_of(store)
    assert [(e.name, e.attributes) for e in spans[0].events] == [
        ("gen_ai.evaluation.result", {"gen_ai.evaluation.name": "team", "gen_ai.evaluation.score.value": 0.5})
    ]
    assert [
        (e.attributes["cotune.candidate.index"], e.attributes[names.EVALUATION_VALUE]) for e in spans[5].events
    ] == [
        (0, 0.0),
        (1, 1.0),
    ]


def test_texts_beside_rewards_are_explanations_where_content_is_asked_for(store: SqliteStore) -> None:
    (episode,) = store.episodes()
    spans = episode_spans(store, episode, Detail(content=True))
    assert [event.attributes.get(names.EVALUATION_EXPLANATION) for event in (*spans[0].events, *spans[5].events)] == [
        f"half of {SECRET}",
        f"not what {SECRET} says",
        None,
    ]
    assert not any(names.EVALUATION_EXPLANATION in e.attributes for span in spans_of(store) for e in span.events)


def test_neither_content_nor_tokens_go_along_unasked(store: SqliteStore, tmp_path: Path) -> None:
    export_file(store, tmp_path / "plain.jsonl")
    plain = (tmp_path / "plain.jsonl").read_text()
    assert SECRET not in plain and "Good?" not in plain
    for name in (names.PROMPT_IDS, names.SAMPLED, names.POLICY, names.POLICY_VERSION, names.INPUT_MESSAGES):
        assert name not in plain
    export_file(store, tmp_path / "content.jsonl", detail=Detail(content=True))
    content = (tmp_path / "content.jsonl").read_text()
    assert content.count(SECRET) > 5 and names.SAMPLED not in content and names.POLICY not in content
    export_file(store, tmp_path / "tokens.jsonl", detail=Detail(tokens=True))
    tokens = (tmp_path / "tokens.jsonl").read_text()
    assert SECRET not in tokens and names.SAMPLED in tokens and names.POLICY_VERSION in tokens


def test_content_has_the_form_of_the_conventions(store: SqliteStore) -> None:
    chat, tool = spans_of(store, content=True)[2:4]
    assert json.loads(chat.attributes["gen_ai.input.messages"]) == [
        {"role": "system", "parts": [{"type": "text", "content": f"You write. {SECRET}"}]},
        {"role": "user", "parts": [{"type": "text", "content": SECRET}, {"type": "text", "content": "and more"}]},
    ]
    assert json.loads(chat.attributes["gen_ai.output.messages"]) == [
        {
            "role": "assistant",
            "parts": [{"type": "tool_call", "id": "call_1", "name": "look", "arguments": {"q": SECRET}}],
            "finish_reason": "tool_calls",
        }
    ]
    tools = json.loads(chat.attributes["gen_ai.tool.definitions"])
    assert tools == [{"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}]
    workflow = spans_of(store, content=True)[0].attributes
    assert (workflow["openinference.span.kind"], json.loads(workflow["input.value"])) == ("CHAIN", {"question": SECRET})
    assert tool.attributes["gen_ai.tool.call.result"] == f"found {SECRET}"
    assert tool.attributes["gen_ai.tool.call.id"] == "call_1"


def test_the_same_records_give_the_same_spans(store: SqliteStore) -> None:
    assert spans_of(store, content=True, tokens=True) == spans_of(store, content=True, tokens=True)


def test_what_has_no_place_is_counted(tmp_path: Path) -> None:
    with SqliteStore.open(tmp_path / "records.db") as store:
        live = LiveEpisode(store, Task(id="t", input=None), workflow="w")
        message = {"role": "user", "content": "x", "cache_control": {"type": "ephemeral"}}
        live.start(CallerContext("r", "test"), {"messages": [message]}).fail("error", "no")
        live.end("ok")
        store.flush()
        left_out: Counter[str] = Counter()
        (episode,) = store.episodes()
        episode_spans(store, episode, Detail(content=True), left_out)
    assert left_out == {"message.cache_control": 1}


@pytest.mark.parametrize("kept", [True, False])
def test_a_last_tool_of_autogen_has_a_span_where_its_result_was_recorded(tmp_path: Path, kept: bool) -> None:
    def look(city: str) -> str:
        return f"{city} is sunny"

    @cotune.workflow
    async def solve(task: Any) -> float:
        agent = AssistantAgent("guide", autogen_client(api_key="none"), tools=[FunctionTool(look, "Looks.")])
        return float("sunny" in str((await agent.run(task="Oslo")).messages[-1].content))

    reply = Responder(lambda call: asks(tool_call("look", {"city": "Oslo"})))
    left_out: Counter[str] = Counter()
    with SqliteStore.open(tmp_path / "records.db") as store:
        batch = EpisodeBatch(tasks=[Task(id="t", input=None)], sink=store, phase="trace", record_tools=kept)
        asyncio.run(rollout(workflow_of(solve), batch, responder=reply))
        store.flush()
        (episode,) = store.episodes()
        spans = episode_spans(store, episode, Detail(content=True), left_out)
    tools = [span for span in spans if span.name == "execute_tool look"]
    assert [span.attributes["gen_ai.tool.call.result"] for span in tools] == ["Oslo is sunny"] * kept
    assert dict(left_out) == ({} if kept else {"tool_without_result": 1})


def test_spans_reach_an_exporter_without_any_tracer_provider(store: SqliteStore) -> None:
    before = trace.get_tracer_provider()
    exporter = InMemorySpanExporter()
    made = export_to(store, exporter)
    spans = exporter.get_finished_spans()
    assert (made.episodes, made.spans, len(spans)) == (1, 10, 10)
    assert spans[0].resource.attributes["service.name"] == "cotune"
    assert spans[2].parent is not None and spans[2].parent.span_id == spans[1].context.span_id
    assert spans[9].status.status_code.name == "ERROR" and spans[2].status.status_code.name == "UNSET"
    assert trace.get_tracer_provider() is before


class _Refusing(InMemorySpanExporter):
    def export(self, spans: Any) -> SpanExportResult:
        return SpanExportResult.FAILURE


def test_an_exporter_that_refuses_is_an_error(store: SqliteStore) -> None:
    with pytest.raises(CotuneError, match="_Refusing did not deliver 10 spans"):
        export_to(store, _Refusing())


def test_a_long_episode_goes_in_several_requests(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[int] = []

    class Counting(InMemorySpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            requests.append(len(spans))
            return super().export(spans)

    monkeypatch.setattr("cotune.integrations.exchange.otel.exporter.REQUEST", 1000)
    exporter = Counting()
    assert export_to(store, exporter, detail=Detail(content=True)).spans == 10
    assert sum(requests) == 10 and 1 < len(requests) < 10
    sent = [span.name for span in exporter.get_finished_spans()]
    assert sent == [span.name for span in spans_of(store)]


@pytest.mark.parametrize("endpoint", ["localhost:4318", "ftp://x", "http://"])
def test_an_endpoint_must_be_an_address(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="endpoint = "):
        otlp_exporter(endpoint)


def test_a_bare_address_gets_the_path_of_traces() -> None:
    assert otlp_exporter("http://127.0.0.1:4318/")._endpoint == "http://127.0.0.1:4318/v1/traces"  # type: ignore[attr-defined]
    assert otlp_exporter("http://127.0.0.1:9/x")._endpoint == "http://127.0.0.1:9/x"  # type: ignore[attr-defined]


def _run(sink: Any) -> None:
    live = LiveEpisode(sink, Task(id="t", input=None), workflow="w")
    live.start(CallerContext("r", "test"), {"messages": []}).fail("error", "no")
    live.end("ok")


def test_episodes_are_exported_while_a_run_goes_on(tmp_path: Path) -> None:
    with SqliteStore.open(tmp_path / "records.db") as store:
        exporter = InMemorySpanExporter()
        live = LiveExport(store, exporter)
        _run(live)
        _run(live)
        live.close()
        assert [span.name for span in exporter.get_finished_spans()].count("invoke_workflow w") == 2
        assert (live.spans, live.failed, len(list(store.episodes()))) == (6, 0, 2)


def test_a_failing_exporter_costs_spans_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with SqliteStore.open(tmp_path / "records.db") as store:
        live = LiveExport(store, _Refusing())
        _run(live)
        _run(live)
        live.close()
        assert (live.spans, live.failed, len(list(store.episodes()))) == (0, 2, 2)
    assert caplog.text.count("could not be exported") == 1


def test_the_command_writes_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path).close()
    assert main(["otel", "export", str(tmp_path), "--out", str(tmp_path / "spans.jsonl")]) == 0
    assert "exported 10 spans of 1 episode" in capsys.readouterr().out
    (line,) = (tmp_path / "spans.jsonl").read_text().splitlines()
    (scope,) = json.loads(line)["resourceSpans"][0]["scopeSpans"]
    assert scope["scope"]["name"] == "cotune" and len(scope["spans"]) == 10
    assert main(["otel", "export", str(tmp_path), "--endpoint", "nowhere"]) == 1
    assert "endpoint = 'nowhere'" in capsys.readouterr().err


def test_a_traced_application_sends_its_spans_as_it_goes(
    tmp_path: Path, provider: Provider, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exporter = InMemorySpanExporter()
    monkeypatch.setattr("cotune.integrations.exchange.otel.exporter.otlp_exporter", lambda url: exporter)
    (tmp_path / "traced_app.py").write_text(
        "import cotune, openai\n"
        "@cotune.workflow\n"
        "def solve(task):\n"
        "    chat = openai.OpenAI().chat.completions\n"
        "    return len(chat.create(model='m', messages=[{'role': 'user', 'content': task}]).choices)\n"
    )
    (tmp_path / "tasks.jsonl").write_text('"heron"\n"egret"\n')
    arguments = [f"{tmp_path}/traced_app.py:solve", "--tasks", f"{tmp_path}/tasks.jsonl", "--out", f"{tmp_path}/run"]
    assert main(["trace", *arguments, "--otlp", "http://127.0.0.1:9"]) == 0
    assert "6 spans sent to http://127.0.0.1:9, 0 episodes could not be sent" in capsys.readouterr().out
    spans = exporter.get_finished_spans()
    assert sorted(span.name for span in spans) == sorted(["invoke_workflow solve", "invoke_agent app", "chat m"] * 2)
    assert not any("heron" in str(span.attributes) for span in spans)


def tool_use(id: str, city: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "look", "arguments": json.dumps({"city": city})}}


def test_tool_calls_that_share_an_id_have_spans_and_results_of_their_own(tmp_path: Path) -> None:
    """Some servers number the calls of every answer anew, or give all the same id."""
    with SqliteStore.open(tmp_path / "records.db") as store:
        live = LiveEpisode(store, Task(id="t", input=None), workflow="w")
        messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
        for turn in range(2):
            call = live.start(CallerContext("writer", "test"), {"model": "m", "messages": list(messages)})
            tools = [tool_use("call_1", f"{turn}a"), tool_use("call_1", f"{turn}b"), tool_use("call_2", f"{turn}c")]
            message = {"role": "assistant", "content": None, "tool_calls": tools}
            call.finish(Answer(candidates=(Candidate(index=0, text="", message=message),)))
            messages.append(message)
            for name, letter in (("call_1", "a"), ("call_1", "b"), ("call_2", "c")):
                messages.append({"role": "tool", "tool_call_id": name, "content": f"result {turn}{letter}"})
        call = live.start(
            CallerContext("writer", "test"), {"model": "m", "messages": messages[4:]}
        )  # a trimmed history
        call.finish(Answer(candidates=(Candidate(index=0, text="", message={"role": "assistant", "content": "end"}),)))
        live.end("ok")
        store.flush()
        [episode] = store.episodes()
        spans = episode_spans(store, episode, Detail(content=True))
    assert len({span.id for span in spans}) == len(spans)
    pairs = [
        (json.loads(span.attributes[names.TOOL_ARGUMENTS])["city"], span.attributes[names.TOOL_RESULT])
        for span in spans
        if span.attributes[names.OPERATION] == names.TOOL
    ]
    assert pairs == [(f"{turn}{letter}", f"result {turn}{letter}") for turn in range(2) for letter in "abc"]
