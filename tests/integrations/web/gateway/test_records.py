"""What goes through the gateway is recorded as in process: roles, turns, parents, retries, streams, rewards."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cotune.cli.printing.overview import show_run
from cotune.storage.sqlite_store import SqliteStore
from tests.integrations import provider as scripted
from tests.integrations.web.gateway.client import HELLO, Bench, ask, bench


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench(tmp_path_factory.mktemp("gateway")) as made:
        yield made


@pytest.fixture
def gate(shared: Bench) -> Bench:
    shared.provider.reply = scripted.said
    shared.provider.requests.clear()
    shared.provider.headers.clear()
    return shared


def test_an_episode_with_roles_by_base_url(gate: Bench) -> None:
    opened = gate.open({"id": "t7", "q": 1}, workflow="team", rollout=2, key="order-7")
    assert opened["task"] == "t7"
    assert opened["base_url"] == f"{gate.url}/e/{opened['id']}/v1"
    planner = gate.client(f"{opened['roles_url']}/planner/v1")
    writer = gate.client(f"{opened['roles_url']}/team%2Fwriter/v1")
    assert [ask(planner), ask(writer), ask(planner, "again")] == ["re: hello", "re: hello", "re: again"]
    ended = gate.end(opened["id"], rewards={"team": True, "style": 0.5}, metrics={"success": True})
    assert ended.json() == {"id": opened["id"], "status": "ok", "calls": 3}
    episode = next(e for e in gate.episodes() if e.id == opened["id"])
    assert (episode.task.id, episode.task.input) == ("t7", {"id": "t7", "q": 1})
    assert (episode.workflow, episode.rollout, episode.status, episode.calls) == ("team", 2, "ok", 3)
    assert episode.key == "order-7"
    assert httpx.post(f"{gate.url}/cotune/episodes", json={"task": 1, "key": "x" * 201}).status_code == 400
    assert episode.metrics == {"success": 1.0}
    assert gate.store.rewards([episode.id])[episode.id] == {"team": 1.0, "style": 0.5}
    calls = gate.calls(opened["id"])
    assert [(c.role, c.step, c.turn) for c in calls] == [("planner", 0, 0), ("team/writer", 1, 0), ("planner", 2, 1)]
    assert {(c.status, c.integration, c.model, c.usage.prompt_tokens) for c in calls} == {("ok", "gateway", "m", 7)}
    assert [gate.store.message(m) for m in calls[2].messages] == [{"role": "user", "content": "again"}]


def test_identity_by_headers_baggage_and_path(gate: Bench) -> None:
    opened = gate.open()
    anywhere = gate.client(f"{gate.url}/v1")
    ask(anywhere, extra_headers={"X-Cotune-Episode": opened["id"], "X-Cotune-Role": "critic"})
    ask(anywhere, extra_headers={"baggage": f"a=1,cotune.episode={opened['id']};p=1, cotune.role=team%2Fjudge"})
    inside = gate.client(opened["base_url"])
    ask(inside)
    ask(inside, extra_headers={"baggage": "cotune.role=scout"})
    named = gate.client(f"{opened['roles_url']}/writer/v1")
    ask(named, extra_headers={"baggage": "cotune.role=scout"})
    ask(named, extra_headers={"X-Cotune-Role": "Gutachter ü".encode()})  # type: ignore[dict-item]
    roles = [call.role for call in gate.calls(opened["id"])]
    assert roles == ["critic", "team/judge", "app", "scout", "writer", "Gutachter ü"]
    assert [headers.get("baggage") for headers in gate.provider.headers] == [None, "a=1", None, None, None, None]
    assert [name for headers in gate.provider.headers for name in headers if name.startswith("x-cotune")] == []


def test_parents_by_what_was_said_and_by_header(gate: Bench) -> None:
    opened = gate.open()
    client = gate.client(opened["base_url"])
    first = client.chat.completions.with_raw_response.create(model="m", messages=HELLO).headers["x-cotune-call"]
    said = [*HELLO, {"role": "assistant", "content": "re: hello"}, {"role": "user", "content": "go on"}]
    client.chat.completions.create(model="m", messages=said)
    ask(client, "a summary in other words", extra_headers={"X-Cotune-Parents": first})
    calls = gate.calls(opened["id"])
    assert calls[0].id == first
    assert [call.parents for call in calls] == [(), (first,), (first,)]


def test_a_stream_passes_as_it_comes_and_is_recorded(gate: Bench) -> None:
    opened = gate.open()
    chunks = gate.client(opened["base_url"]).chat.completions.create(model="m", messages=HELLO, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "re: hello"
    gate.end(opened["id"])
    (call,) = gate.calls(opened["id"])
    assert (call.status, call.streamed, call.candidates[0].text) == ("ok", True, "re: hello")


def test_token_ids_and_logprobs_are_recorded(gate: Bench) -> None:
    def reply(body: dict[str, Any], number: int) -> Any:
        answer = scripted.completion({"role": "assistant", "content": "ab"}, prompt_token_ids=[5, 6, 7])
        answer["choices"][0] |= {"token_ids": [8, 9], "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -1.0}]}}
        return scripted.json_reply(answer)

    gate.provider.reply = reply
    opened = gate.open()
    httpx.post(f"{opened['base_url']}/chat/completions", json={"model": "m", "messages": HELLO})
    gate.end(opened["id"])
    (call,) = gate.calls(opened["id"])
    assert call.prompt is not None and gate.store.token_ids(call.prompt) == (5, 6, 7)
    assert (call.candidates[0].token_ids, call.candidates[0].logprobs) == ((8, 9), (-0.5, -1.0))


def test_responses_are_calls_and_text_completions_are_counted(gate: Bench) -> None:
    output = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hi"}]}]
    response = {"id": "r1", "object": "response", "status": "completed", "output": output}
    legacy = {"id": "c", "object": "text_completion", "choices": [{"index": 0, "text": " b", "finish_reason": "stop"}]}
    gate.provider.reply = lambda body, number: scripted.json_reply(legacy if "prompt" in body else response)
    opened = gate.open()
    client = gate.client(opened["base_url"])
    assert client.responses.create(model="m", input="hello").output_text == "hi"
    assert client.completions.create(model="m", prompt="a").choices[0].text == " b"
    assert gate.client(f"{gate.url}/v1").completions.create(model="m", prompt="a").choices[0].text == " b"
    assert gate.health()["warnings"]["unseen_call"] == 2
    gate.end(opened["id"])
    calls = gate.calls(opened["id"])
    assert [(c.status, c.params["api"], c.candidates[0].text) for c in calls] == [("ok", "responses", "hi")]


def test_models_and_embeddings_pass_and_are_no_calls(gate: Bench) -> None:
    gate.provider.reply = lambda body, number: scripted.json_reply({"object": "list", "data": []})
    opened = gate.open()
    answer = httpx.post(f"{opened['base_url']}/embeddings", json={"model": "e", "input": "x"})
    assert (answer.status_code, answer.json()) == (200, {"object": "list", "data": []})
    assert gate.end(opened["id"]).json()["calls"] == 0
    assert gate.provider.requests == [{"model": "e", "input": "x"}]


def test_every_attempt_of_an_sdk_is_a_call(gate: Bench) -> None:
    def flaky(body: dict[str, Any], number: int) -> Any:
        if number < 2:
            return 503 if number else 429, "application/json", [b"{}"]
        return scripted.said(body)

    gate.provider.reply = flaky
    opened = gate.open()
    client = gate.client(opened["base_url"], max_retries=3)
    client._calculate_retry_timeout = lambda *a, **k: 0.0  # type: ignore[method-assign]
    assert ask(client) == "re: hello"
    assert gate.health()["open_calls"] == 0
    assert gate.end(opened["id"]).json()["calls"] == 3
    assert [(call.status, call.error) for call in gate.calls(opened["id"])] == [
        ("error", "HTTP 429 Too Many Requests"),
        ("error", "HTTP 503 Service Unavailable"),
        ("ok", None),
    ]
    assert gate.health()["failures"]["error"] >= 2


def test_malformed_answers_are_recorded_as_such_and_passed_on(gate: Bench) -> None:
    gate.provider.reply = lambda body, number: (
        200,
        "application/json",
        [b'{"choices": []}', b"{"][number : number + 1],
    )
    opened = gate.open()
    url = f"{opened['base_url']}/chat/completions"
    assert httpx.post(url, json={"messages": HELLO}).content == b'{"choices": []}'
    assert httpx.post(url, json={"messages": HELLO}).content == b"{"
    gate.end(opened["id"])
    assert [call.status for call in gate.calls(opened["id"])] == ["malformed", "malformed"]


def test_compressed_bodies_both_ways(gate: Bench) -> None:
    answer = gzip.compress(json.dumps(scripted.completion({"role": "assistant", "content": "zipped"})).encode())

    class Handler:
        def __call__(self, body: dict[str, Any], number: int) -> Any:
            return 200, "application/json\r\ncontent-encoding: gzip", [answer]

    gate.provider.reply = Handler()
    opened = gate.open()
    ask(gate.client(opened["base_url"]))
    gate.end(opened["id"])
    assert gate.calls(opened["id"])[0].candidates[0].text == "zipped"
    assert gate.provider.headers[0]["accept-encoding"] == "gzip"


def test_late_rewards_of_an_episode_and_a_candidate(gate: Bench) -> None:
    opened = gate.open()
    ask(gate.client(opened["base_url"]))
    gate.end(opened["id"], rewards={"team": 0.0}, feedback="wrong sum")
    (call,) = gate.calls(opened["id"])

    def reward(target: str, value: Any = 1.0) -> httpx.Response:
        late = {"target": target, "rewards": {"late": value}, "feedback": "right after all"}
        return httpx.post(f"{gate.url}/cotune/rewards", json=late)

    assert reward(opened["id"]).status_code == reward(f"{call.id}.0").status_code == 200
    assert (reward(f"{call.id}.1").status_code, reward("x").status_code) == (404, 400)
    gate.store.flush()
    found = gate.store.rewards([opened["id"], f"{call.id}.0"])
    assert found == {opened["id"]: {"team": 0.0, "late": 1.0}, f"{call.id}.0": {"late": 1.0}}
    assert gate.store.feedback([opened["id"], f"{call.id}.0"]) == {
        opened["id"]: {"team": "wrong sum", "late": "right after all"},
        f"{call.id}.0": {"late": "right after all"},
    }


def test_an_episode_ends_once(gate: Bench) -> None:
    opened = gate.open()
    assert gate.end(opened["id"], status="error", error="it broke").status_code == 200
    again = gate.end(opened["id"])
    assert (again.status_code, again.json()["error"]["code"]) == (404, "unknown_episode")
    episode = next(e for e in gate.episodes() if e.id == opened["id"])
    assert (episode.status, episode.error) == ("error", "it broke")


def test_calls_outside_any_episode_are_recorded_under_an_implicit_one(tmp_path: Path) -> None:
    with bench(tmp_path) as gate:
        ask(gate.client(f"{gate.url}/r/planner/v1"))
        ended = gate.open()["id"]
        gate.end(ended)
        ask(gate.client(f"{gate.url}/e/{ended}/r/late/v1"))
        orphan = gate.open()["id"]
        health = gate.health()
    assert (health["records"]["unattributed"], health["warnings"]) == (2, {"no_episode": 1, "late_call": 1})
    with SqliteStore.open(tmp_path, read_only=True) as store:
        found = {
            episode.workflow if episode.workflow == "implicit" else episode.id: episode for episode in store.episodes()
        }
        assert (found["implicit"].status, found["implicit"].calls) == ("ok", 2)
        assert [call.role for call in store.calls(found["implicit"].id)] == ["planner", "late"]
        assert (found[orphan].status, found[orphan].error) == (
            "cancelled",
            "the gateway stopped before the episode ended",
        )
    assert show_run(tmp_path) is not None


def test_implicit_episodes_stay_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotune.integrations.web.gateway.episodes.PAUSE", 0.2)
    ended = threading.Event()
    with bench(tmp_path) as gate:
        client, made = gate.client(f"{gate.url}/v1"), gate.running.opened
        for _ in range(2):
            ask(client)

        def look() -> None:
            ended.set() if not made.episodes.open else made.loop.call_later(0.02, look)

        made.loop.call_soon_threadsafe(look)
        assert ended.wait(30)
        monkeypatch.setattr("cotune.integrations.web.gateway.episodes.PAUSE", 60.0)
        ask(client)
        monkeypatch.setattr("cotune.integrations.web.gateway.episodes.IMPLICIT_SECONDS", 1e-6)
        for _ in range(2):
            ask(client)
    with SqliteStore.open(tmp_path, read_only=True) as store:
        found = [(episode.workflow, episode.status, episode.calls) for episode in store.episodes()]
    assert found == [("implicit", "ok", calls) for calls in (2, 1, 1, 1)]
