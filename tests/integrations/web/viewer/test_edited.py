"""A call under edited prompts: its page and its span say what was asked and what was sent."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import openai

import cotune
from cotune.integrations.exchange.otel import names
from cotune.integrations.exchange.otel.spans import Detail, episode_spans
from cotune.integrations.web.viewer.pages import build_app
from cotune.reading.find_runs import FoundRuns
from cotune.storage.open_store import open_store
from tests.integrations.edits import NEW, OLD, prompts
from tests.integrations.provider import serving


def test_what_was_asked_and_what_was_sent(tmp_path: Path) -> None:
    asked = [{"role": "system", "content": OLD}, {"role": "user", "content": "hello"}]
    (tmp_path / "run").mkdir()
    with serving() as provider, cotune.trace(tmp_path / "run", prompts=prompts()) as traced:
        client = openai.OpenAI(base_url=provider.url, api_key="k", max_retries=0)
        client.chat.completions.create(model="m", messages=asked)
        client.chat.completions.create(model="m", messages=asked[1:])
    first, second = traced.calls

    with open_store(tmp_path / "run" / "records.db", read_only=True) as store:
        spans = episode_spans(store, store.episode(traced.id), Detail(content=True))
    edited, unedited = [span.attributes for span in spans if names.INPUT_MESSAGES in span.attributes]
    told = [json.loads(edited[name])[0]["parts"][0]["content"] for name in (names.INPUT_MESSAGES, names.ASKED_MESSAGES)]
    assert told == [NEW, OLD]
    assert (edited[names.PROMPTS], unedited[names.UNEDITED]) == (prompts().id, "prompt_unmatched")
    assert names.ASKED_MESSAGES not in unedited

    async def page(id: str) -> str:
        runs = FoundRuns([tmp_path / "run"])
        transport = httpx.ASGITransport(build_app(runs))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as viewer:
            text = (await viewer.get(f"/run/run/call/{id}")).text
        runs.close()
        return text

    shown = asyncio.run(page(first.id))
    assert "Sent instead" in shown
    assert shown.index(OLD) < shown.index("in place of message 1") < shown.index("Say no more")
    assert "prompt_unmatched" in asyncio.run(page(second.id))
