from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from cotune.integrations.collect import sender as senders
from cotune.integrations.collect.apps import Apps
from cotune.integrations.collect.server import Collector, running_collector
from cotune.integrations.web.http.server import RunningServer
from tests.integrations.provider import serving

TOKENS = {"desk": ["desk-token-0123456789"], "shop": ["shop-token-0123456789"]}


@pytest.fixture(autouse=True)
def spool_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A spool of the test's own, and senders that it has to itself."""
    monkeypatch.setenv("COTUNE_SPOOL", str(tmp_path / "spool"))
    monkeypatch.setattr(senders._senders, "by_address", {})
    monkeypatch.setattr(senders, "LINGER", 0.02)
    yield tmp_path / "spool"
    for sender in senders._senders.by_address.values():
        sender.finish()


@pytest.fixture
def records(tmp_path: Path) -> Path:
    return tmp_path / "collected" / "records.db"


@pytest.fixture
def collector(records: Path) -> Iterator[RunningServer[Collector]]:
    with running_collector(str(records), Apps()) as found:
        yield found


@pytest.fixture
def guarded(records: Path) -> Iterator[RunningServer[Collector]]:
    """A collector that knows two applications by their tokens."""
    with running_collector(str(records), Apps("operator-token", TOKENS)) as found:
        yield found


@pytest.fixture
def ask() -> Iterator[Callable[[str], str]]:
    """Asks a provider, as an application does."""
    with serving() as provider, openai.OpenAI(base_url=provider.url, api_key="k", max_retries=0) as client:

        def asked(text: str) -> str:
            answer = client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])
            return answer.choices[0].message.content or ""

        yield asked
