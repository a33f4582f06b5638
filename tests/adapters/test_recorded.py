"""Answers of trained policies are recorded with policy, version, token ids and log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import cotune
from cotune.adapters.serving import Answers
from cotune.integrations.collect import sender as senders
from cotune.integrations.collect.apps import Apps
from cotune.integrations.collect.server import running_collector
from cotune.records.structs import PolicyRef
from cotune.storage.open_store import open_store
from tests.adapters.test_serve import HELLO, scripted


@pytest.fixture(autouse=True)
def spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("COTUNE_SPOOL", str(tmp_path / "spool"))
    monkeypatch.setattr(senders._senders, "by_address", {})
    monkeypatch.setattr(senders, "LINGER", 0.02)
    yield


def hide(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": str(message["content"]).replace("secret", "*")}


def ask(url: str, text: str = "hello", **more: Any) -> Any:
    with openai.OpenAI(base_url=url, api_key="k", max_retries=0) as client:
        messages = [{"role": "user", "content": text}]
        return client.chat.completions.with_raw_response.create(model="writer", messages=messages, **more)


def test_served_answers_are_recorded_in_a_store(tmp_path: Path) -> None:
    with scripted(Answers(records=tmp_path / "records.db")) as (endpoint, _):
        answer = ask(endpoint.url, n=2)
        with pytest.raises(openai.APIStatusError):
            ask(endpoint.url, "slow")
        list(ask(endpoint.url, stream=True).parse())
    with open_store(tmp_path / "records.db", read_only=True) as store:
        first, failed, streamed = store.episodes()
        (call,) = store.calls(first.id)
        assert (answer.headers["x-cotune-episode"], answer.headers["x-cotune-call"]) == (first.id, call.id)
        assert (call.role, call.policy, call.prompt_tokens) == ("writer", PolicyRef("writer", 3), 5)
        assert [candidate.text for candidate in call.candidates] == ["reply0", "reply1"]
        assert call.candidates[0].token_ids == tuple(b"reply0")
        assert call.candidates[0].logprobs == (-0.5,) * 6
        assert store.token_ids(call.prompt) == tuple(b"hello")
        assert [store.message(name) for name in call.messages] == HELLO
        assert (failed.status, store.calls(failed.id)[0].status) == ("error", "timeout")
        assert store.calls(streamed.id)[0].streamed


def test_served_answers_are_rewarded_by_the_applications_own_key(tmp_path: Path) -> None:
    store_at = tmp_path / "records.db"
    with scripted(Answers(records=store_at, app="desk")) as (endpoint, _):
        ask(endpoint.url, extra_headers={"X-Cotune-Key": "order-7"})
        for bad in ("x" * 201, b"caf\xe9"):
            with pytest.raises(openai.BadRequestError, match="X-Cotune-Key is at most 200 printable characters"):
                ask(endpoint.url, extra_headers={"X-Cotune-Key": bad})
    cotune.feedback(key="order-7", reward=1.0, records=store_at, app="desk")
    with open_store(store_at, read_only=True) as store:
        (episode,) = store.episodes()
        assert (episode.key, store.rewards([episode.id])) == ("order-7", {episode.id: {"team": 1.0}})


def test_served_answers_are_redacted_and_sent_to_a_collector(tmp_path: Path) -> None:
    with running_collector(str(tmp_path / "records.db"), Apps()) as collector:
        options = {"records": collector.url, "app": "desk", "redactors": [hide]}
        with scripted(Answers(**options)) as (endpoint, _):
            ask(endpoint.url, "my secret")
        assert senders.sender(collector.url, "desk").flush(10)
        senders.sender(collector.url, "desk").finish()
    with open_store(tmp_path / "records.db", read_only=True) as store:
        (episode,) = store.episodes()
        (call,) = store.calls(episode.id)
        assert store.message(call.messages[0])["content"] == "my *"
        assert (call.policy, call.prompt) == (PolicyRef("writer", 3), None)


def test_without_records_nothing_is_recorded() -> None:
    with scripted() as (endpoint, _):
        assert "x-cotune-episode" not in ask(endpoint.url).headers
