"""Edited prompts through the gateway: the body's other bytes pass as they came, also packed, in each interface."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import zstandard

import cotune
from tests.integrations import provider as scripted
from tests.integrations.edits import NEW, OLD, part, prompts, with_edit
from tests.integrations.recorded import Recorded
from tests.integrations.web.gateway.client import Bench, bench
from tests.integrations.web.gateway.test_anthropic import SPOKEN, stream

ASKED = {"model": "m", "messages": [{"role": "system", "content": OLD}, {"role": "user", "content": "hi"}], "x": 1.50}
BLOCKS = [
    {"type": "text", "text": "A long beginning that is cached. ", "cache_control": {"type": "ephemeral"}},
    {"type": "text", "text": OLD},
]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    joined = part(BLOCKS[0]["text"] + OLD, BLOCKS[0]["text"] + NEW)
    tool = part("looks", "looks up", kind="tool", key="look")
    with bench(tmp_path_factory.mktemp("gateway"), prompts=prompts(part(OLD, NEW), joined, tool)) as made:
        yield made


@pytest.fixture
def gate(shared: Bench) -> Bench:
    shared.provider.reply = scripted.said
    for kept in (shared.provider.requests, shared.provider.headers, shared.provider.raw):
        kept.clear()
    return shared


def sent_of(gate: Bench, episode: str) -> list[Any]:
    (call,) = gate.calls(episode)
    assert (call.status, call.prompts, call.unedited) == ("ok", gate.running.opened.episodes.config.prompts.id, "")
    assert gate.store.message(call.messages[0])["content"] != gate.store.message(call.sent[0])["content"]
    return [gate.store.message(name)["content"] for name in call.sent]


@pytest.mark.parametrize("coding", ["identity", "gzip", "zstd"])
@pytest.mark.parametrize("streamed", [False, True])
def test_chat(gate: Bench, coding: str, streamed: bool) -> None:
    raw = json.dumps({**ASKED, "stream": streamed}, indent=1).encode()
    headers = {"content-type": "application/json", "content-encoding": coding}
    opened = gate.open()
    pack = {"identity": bytes, "gzip": gzip.compress, "zstd": zstandard.compress}[coding]
    body = pack(raw)
    answer = httpx.post(f"{opened['base_url']}/chat/completions", content=body, headers=headers)
    assert answer.status_code == 200
    gate.end(opened["id"])
    assert gate.provider.raw == [with_edit(raw)]
    assert "content-encoding" not in gate.provider.headers[0]
    assert sent_of(gate, opened["id"]) == [NEW, "hi"]


def test_a_body_that_is_not_edited_stays_packed(gate: Bench) -> None:
    other = gate.open()
    raw = gzip.compress(json.dumps(ASKED).encode())
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    httpx.post(f"{other['roles_url']}/other/v1/chat/completions", content=raw, headers=headers)
    gate.end(other["id"])
    assert gate.provider.raw == [raw]


@pytest.mark.parametrize("streamed", [False, True])
def test_anthropic_keeps_its_blocks_and_their_cache(gate: Bench, streamed: bool) -> None:
    import anthropic

    gate.provider.reply = lambda body, n: (
        (200, "text/event-stream", stream()) if streamed else scripted.json_reply(SPOKEN)
    )
    opened = gate.open()
    client = anthropic.Anthropic(base_url=opened["base_url"].removesuffix("/v1"), api_key="k", max_retries=0)
    tools = [{"name": "look", "description": "looks", "input_schema": {"type": "object", "properties": {}}}]
    for system in (OLD, BLOCKS):
        made = client.messages.create(
            model="c", max_tokens=9, system=system, tools=tools, stream=streamed,
            messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        )  # fmt: skip
        assert list(made)
    gate.end(opened["id"])
    plain, blocks = gate.provider.requests
    assert plain["system"] == NEW
    assert blocks["system"] == [BLOCKS[0], {"type": "text", "text": NEW}]
    assert blocks["tools"][0] == {**tools[0], "description": "looks up"}
    assert blocks["messages"] == [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    calls = gate.calls(opened["id"])
    assert [gate.store.message(call.sent[0])["content"] for call in calls] == [NEW, BLOCKS[0]["text"] + NEW]


def test_health_counts_calls_that_do_not_have_the_text(gate: Bench) -> None:
    opened = gate.open()
    raw = json.dumps({**ASKED, "messages": [{"role": "system", "content": "Something else."}]}).encode()
    httpx.post(f"{opened['base_url']}/chat/completions", content=raw, headers={"content-type": "application/json"})
    gate.end(opened["id"])
    assert gate.provider.raw == [raw]
    health = gate.health()
    assert health["warnings"]["prompt_unmatched"] == 1
    assert len(health["prompts"]) == 64


def test_the_gateway_of_a_workflow_edits_as_its_episode_does(provider: Any, record: Recorded) -> None:
    with cotune.trace(prompts=prompts()) as traced, cotune.gateway() as gate:
        httpx.post(f"{gate.url}/chat/completions", json=ASKED)
    assert provider.requests[0]["messages"][0]["content"] == NEW
    assert traced.calls[0].sent[0]["content"] == NEW
