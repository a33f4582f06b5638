"""Prompts of megabytes: refused before they are tokenized, tokenized beside other requests, and not kept."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from cotune.adapters.open_policies import LocalPolicies, ServedModel
from cotune.adapters.serving import Endpoint, serving_local
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.records.structs import PolicyRef
from cotune.runtime.bounded_cache import BoundedCache
from cotune.sampling.protocol import Completion, SamplerInfo, SamplingParams

TOKENS = 3 << 20


class Silent:
    """A sampler of long prompts that says one token."""

    async def sample(
        self, prompt_token_ids: Sequence[int], n: int, params: SamplingParams, policy: PolicyRef
    ) -> list[Completion]:
        return [Completion((65,), (-0.1,), "stop")]

    async def info(self) -> SamplerInfo:
        return SamplerInfo(name="silent", max_model_len=TOKENS)

    async def aclose(self) -> None:
        pass


@contextlib.contextmanager
def served(base: Path, longest: int) -> Iterator[tuple[Endpoint, ChatTemplate]]:
    chat = ChatTemplate.load(base)

    async def opened() -> LocalPolicies:
        models = {"writer": ServedModel("writer", PolicyRef("writer", 0), "frozen", "tiny", "0", "0")}
        return LocalPolicies(Silent(), chat, models, [], longest)  # type: ignore[arg-type]

    with serving_local(opened) as endpoint:
        yield endpoint, chat


def ask(endpoint: Endpoint, size: int, mark: str = "") -> httpx.Response:
    body = {"model": "writer", "messages": [{"role": "user", "content": mark + "word " * (size // 5)}]}
    return httpx.post(f"{endpoint.url}/chat/completions", json=body, timeout=120)


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(base, 512) as (endpoint, chat):
        tokenized: list[int] = []
        encode = chat.tokenizer.encode
        monkeypatch.setattr(
            chat.tokenizer, "encode", lambda text, **options: tokenized.append(len(text)) or encode(text, **options)
        )
        answer = ask(endpoint, 10 << 20)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert "the model takes 512 tokens" in answer.json()["error"]["message"]
        assert not tokenized
        assert ask(endpoint, 100).status_code == 200


def test_refused_prompts_are_not_kept(base: Path) -> None:
    with served(base, 5000) as (endpoint, chat):
        for i in range(20):
            answer = ask(endpoint, 30_000, str(i))
            assert "tokens; the model takes 5000" in answer.json()["error"]["message"]
        assert chat._rendered.bytes == 0
        kept = httpx.get(endpoint.url.replace("/v1", "/health")).json()["conversations"]
        assert kept == {"requests": 0, "bytes": 0}


@pytest.mark.slow
def test_a_long_prompt_delays_nobody_else(base: Path) -> None:
    with served(base, TOKENS) as (endpoint, _):
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(ask(endpoint, 2 << 20)))
        asking.start()
        others = 0
        with httpx.Client() as client:
            while asking.is_alive():
                others += client.get(endpoint.url.replace("/v1", "/health")).status_code == 200
                assert ask(endpoint, 10).status_code == 200
        asking.join()
        assert answers[0].json()["usage"]["prompt_tokens"] > 2_000_000
        assert others >= 4


def test_a_memory_is_bounded_in_entries_and_bytes() -> None:
    kept: BoundedCache[str] = BoundedCache(3, 100)
    for i in range(5):
        kept.put(bytes([i]), str(i), 10)
    assert (len(kept), kept.bytes, kept.get(b"\1"), kept.get(b"\2")) == (3, 30, None, "2")
    kept.put(b"\2", "again", 25)
    kept.put(b"big", "big", 26)
    assert (kept.get(b"\2"), kept.bytes, kept.get(b"big")) == ("again", 45, None)
    for i in range(9):
        kept.put(bytes([i]), "x", 25)
    assert kept.bytes <= 100


def test_kept_conversations_are_bounded(base: Path) -> None:
    from cotune.adapters.conversations import Conversations
    from cotune.records.ids import pack_ids

    kept = Conversations(entries=10, size=20_000)
    for i in range(50):
        chat: list[dict[str, Any]] = [{"role": "user", "content": str(i)}]
        kept.keep(kept.find("writer", chat), range(300), {"content": "yes"}, [1, 2])
    assert kept.kept()["requests"] <= 10
    assert kept.kept()["bytes"] <= 20_000
    later = [*chat, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "on"}]
    assert kept.find("writer", later).paths == [pack_ids(range(300)), pack_ids((*range(300), 1, 2))]
    assert kept.find("planner", later).paths == []


def test_a_long_answer_is_freed_by_no_event_loop(base: Path) -> None:
    freed: list[str] = []

    class Told(tuple):  # type: ignore[type-arg]
        def __del__(self) -> None:
            freed.append(threading.current_thread().name)

    class Text(str):
        def __del__(self) -> None:
            freed.append(threading.current_thread().name)

    class Telling(Silent):
        async def sample(self, *given: Any) -> list[Completion]:
            return [Completion((65,), (-0.1,), "stop", (Told([(65, -0.1)]),)) for _ in range(3)]

    async def opened() -> LocalPolicies:
        models = {"writer": ServedModel("writer", PolicyRef("writer", 0), "frozen", "tiny", "0", "0")}
        chat = ChatTemplate.load(base)
        parse = chat.parse
        chat.parse = lambda *given, **named: (Text("A"), *parse(*given, **named)[1:])  # type: ignore[method-assign]
        return LocalPolicies(Telling(), chat, models, [], 512)  # type: ignore[arg-type]

    body = {"model": "writer", "messages": [{"role": "user", "content": "x"}], "n": 3, "logprobs": True}
    with serving_local(opened) as endpoint:
        assert httpx.post(f"{endpoint.url}/chat/completions", json=body).status_code == 200
    assert len(freed) == 6 and "cotune-serve" not in freed
