"""A gateway before a scripted provider, and what it recorded."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai

from cotune.integrations.web.gateway.server import Gateway, running_gateway
from cotune.integrations.web.gateway.settings import GatewayConfig
from cotune.integrations.web.http.server import RunningServer
from cotune.records.structs import CallRecord, Episode
from cotune.storage.sqlite_store import SqliteStore
from tests.integrations.provider import Provider, serving

HELLO = [{"role": "user", "content": "hello"}]


@dataclass
class Bench:
    """The gateway with its provider; `calls` and `episodes` flush and read what is recorded."""

    provider: Provider
    running: RunningServer[Gateway]
    folder: Path

    @property
    def url(self) -> str:
        return self.running.url

    @property
    def store(self) -> SqliteStore:
        store = self.running.opened.store
        assert store is not None
        return store

    def open(self, task: Any = None, **more: Any) -> dict[str, Any]:
        answer = httpx.post(f"{self.url}/cotune/episodes", json={"task": task or {"id": "t"}, **more})
        assert answer.status_code == 201, answer.text
        return answer.json()

    def end(self, episode: str, **outcome: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/cotune/episodes/{episode}/end", json=outcome)

    def client(self, base: str, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=base, api_key="provider-key", **{"max_retries": 0, **options})

    def health(self) -> dict[str, Any]:
        return httpx.get(f"{self.url}/health").json()

    def calls(self, episode: str) -> list[CallRecord]:
        self.store.flush()
        return self.store.calls(episode)

    def episodes(self) -> list[Episode]:
        self.store.flush()
        return list(self.store.episodes())

    def when_idle(self) -> None:
        """Wait until the gateway has no request in flight."""
        made, idle = self.running.opened, threading.Event()

        def look() -> None:
            if made.proxy.in_flight:
                made.loop.call_later(0.005, look)
            else:
                idle.set()

        made.loop.call_soon_threadsafe(look)
        assert idle.wait(20)


@contextlib.contextmanager
def bench(folder: Path, **options: Any) -> Iterator[Bench]:
    with serving() as provider, running_gateway(GatewayConfig(upstream=provider.url, **options), folder) as running:
        yield Bench(provider, running, folder)


def ask(client: openai.OpenAI, text: str = "hello", **more: Any) -> str | None:
    answer = client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}], **more)
    return answer.choices[0].message.content


Reply = Callable[[dict[str, Any], int], tuple[int, str, list[Any]]]
