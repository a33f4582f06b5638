"""From an application to the collector's store: what is recorded arrives, once, and can be shown."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from opentelemetry.exporter.otlp.proto.http import Compression

import cotune
from cotune.errors import ConfigError, RecordError
from cotune.integrations.collect.otlp import PROTOBUF
from cotune.integrations.collect.sender import sender
from cotune.storage.open_store import open_store


def test_a_trace_arrives_at_the_store(collector, records: Path, ask) -> None:
    with cotune.trace(collector.url, app="desk", task={"id": "t1"}) as traced:
        assert ask("hello") == "re: hello"
        assert ask("again") == "re: again"
        traced.reward(0.5)
    assert sender(collector.url, "desk").flush(10)

    with open_store(records, read_only=True) as store:
        (episode,) = store.episodes()
        calls = store.calls(episode.id)
        assert (episode.id, episode.task.id, episode.status) == (traced.id, "t1", "ok")
        assert [call.candidates[0].text for call in calls] == ["re: hello", "re: again"]
        assert store.message(calls[0].messages[0]) == {"role": "user", "content": "hello"}
        assert store.rewards([traced.id]) == {traced.id: {"team": 0.5}}
    text = httpx.get(f"{collector.url}/metrics").text
    assert 'cotune_collect_records_total{app="desk",kind="call"} 2' in text
    assert 'cotune_collect_records_total{app="desk",kind="episode"} 1' in text


def test_the_environment_names_the_collector_and_the_application(collector, records: Path, ask, monkeypatch) -> None:
    monkeypatch.setenv("COTUNE_COLLECTOR", collector.url)
    monkeypatch.setenv("COTUNE_APP", "desk")
    with cotune.trace() as traced:
        ask("hello")
    assert sender(collector.url, "desk").flush(10)
    with open_store(records, read_only=True) as store:
        assert [call.episode for call in store.calls(traced.id)] == [traced.id]


def test_what_was_sent_cannot_be_read_here(collector, ask) -> None:
    with cotune.trace(collector.url, app="desk") as traced:
        ask("hello")
        with pytest.raises(RecordError, match="The records of this trace go to http"):
            traced.calls  # noqa: B018


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("https://", {"app": "desk"}, "collector = 'https://' is not the address of a collector"),
        ("http://c:4319", {}, "app is missing"),
        ("http://c:4319", {"app": "../desk"}, "app = '../desk' is not the name of an application"),
        ("http://c:4319", {"app": "desk", "sample": {"solver": 2}}, "sample\\['solver'\\] = 2 must be a number from 0"),
        (None, {"sample": 0.5}, "sample = 0.5 needs a collector"),
    ],
)
def test_what_cannot_be_used_is_refused(path, options, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cotune.trace(path, **options)


def test_sampling_leaves_out_whole_episodes_and_says_so(collector, records: Path, ask) -> None:
    for _ in range(3):
        with cotune.trace(collector.url, app="desk", sample=0.0) as traced:
            ask("hello")
            traced.reward(1.0)
    with cotune.trace(collector.url, app="desk", sample=1.0):
        ask("hello")
    assert sender(collector.url, "desk").flush(10)
    with open_store(records, read_only=True) as store:
        assert (store.figures().counts(), store.counters()["sampled"]) == ((1, 1), 3)
    assert 'cotune_collect_source_sampled_calls_total{app="desk"} 3' in httpx.get(f"{collector.url}/metrics").text


def test_a_role_that_is_left_out_leaves_its_messages_to_others(collector, records: Path, ask) -> None:
    with cotune.trace(collector.url, app="desk", sample={"planner": 0.0}) as traced:
        with cotune.role("planner"):
            ask("shared")
            ask("private")
        with cotune.role("solver"):
            ask("shared")
    assert sender(collector.url, "desk").flush(10)
    with open_store(records, read_only=True) as store:
        (call,) = store.calls(traced.id)
        assert (call.role, store.message(call.messages[0])["content"]) == ("solver", "shared")
        assert not store.figures().episodes_with_text("private", [traced.id], {})
    assert b"private" not in records.read_bytes() + records.with_name("records.db-wal").read_bytes()


def test_a_redactor_works_before_anything_reaches_the_disk(collector, records: Path, spool_folder: Path, ask) -> None:
    collector.opened.apps.needed = True  # every batch is refused, so that all of it stays in the spool

    def hide(message):
        return {**message, "content": "gone"}

    with cotune.trace(collector.url, app="desk", redactor=hide):
        ask("my secret")
    files = list(spool_folder.rglob("*.frames"))
    assert files and all(b"secret" not in path.read_bytes() and b"gone" in path.read_bytes() for path in files)


def test_spans_arrive_by_otlp_in_protobuf_and_json(collector, records: Path) -> None:
    """With OpenTelemetry's own exporter, as an application without cotune would have it."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporter = OTLPSpanExporter(endpoint=f"{collector.url}/v1/traces", compression=Compression.Gzip)
    provider = TracerProvider(resource=Resource.create({"service.name": "help desk"}))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    tracer = provider.get_tracer("app")
    asked = '[{"role": "user", "parts": [{"type": "text", "content": "hello"}]}]'
    said = '[{"role": "assistant", "parts": [{"type": "text", "content": "good day"}], "finish_reason": "stop"}]'
    with tracer.start_as_current_span("invoke_agent solver", attributes={"gen_ai.operation.name": "invoke_agent"}):
        names = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"}
        chat = {**names, "gen_ai.input.messages": asked, "gen_ai.output.messages": said}
        with tracer.start_as_current_span("chat m", attributes=chat):
            pass
    provider.shutdown()

    with open_store(records, read_only=True) as store:
        (episode,) = store.episodes()
        (call,) = store.calls(episode.id)
        assert (episode.app, call.model, call.candidates[0].text) == ("help-desk", "m", "good day")
        assert store.message(call.messages[0])["content"] == "hello"
    answer = httpx.post(f"{collector.url}/v1/traces", json={"resourceSpans": []})
    assert (answer.status_code, answer.json()) == (200, {})
    answer = httpx.post(f"{collector.url}/v1/traces", content=b"\xff\xff", headers={"content-type": PROTOBUF})
    assert (answer.status_code, "The body is no OTLP request" in answer.text) == (400, True)


def test_episodes_are_rewarded_later(collector, records: Path, ask) -> None:
    with cotune.trace(collector.url, app="desk", key="order-7") as traced:
        ask("hello")
    cotune.feedback(traced.id, 1.0, text="It helped.", records=collector.url, app="desk")
    assert sender(collector.url, "desk").flush(10)
    given = {"app": "desk", "episode": traced.id, "reward": {"team": 0.25, "kept": True}}
    answer = httpx.post(f"{collector.url}/v1/feedback", json=given)
    assert answer.json() == {"target": traced.id, "rewards": {"team": 0.25, "kept": 1.0}}
    with open_store(records, read_only=True) as store:
        assert store.episode(traced.id).key == "order-7"
        assert store.rewards([traced.id]) == {traced.id: {"team": 0.25, "kept": 1.0}}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"app": "desk", "reward": 1}, "Either `episode` or `key` is needed"),
        ({"app": "desk", "episode": "01", "reward": 1}, "'01' cannot be rewarded: invalid_id"),
        ({"app": "desk", "key": "k"}, "A `reward` or a `text` is needed"),
        ({"app": "desk", "key": "k", "reward": "good"}, "reward: Expected"),
        ({"app": "desk", "key": "k", "reward": 1, "rewrd": 2}, "unknown field `rewrd`"),
        ({"app": "desk", "key": "k", "reward": 1e39}, "cannot be rewarded: value"),
        ({"key": "k", "reward": 1}, "app is missing"),
    ],
)
def test_feedback_that_cannot_be_kept_says_why(collector, body, message: str) -> None:
    answer = httpx.post(f"{collector.url}/v1/feedback", json=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
