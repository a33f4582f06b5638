"""Several gateways record to one store, through a collector."""

from __future__ import annotations

from pathlib import Path

import openai

from cotune.integrations.collect.sender import sender
from cotune.integrations.web.gateway.server import running_gateway
from cotune.integrations.web.gateway.settings import GatewayConfig
from cotune.storage.open_store import open_store
from tests.integrations.provider import serving


def test_gateways_record_to_a_collector(collector, records: Path) -> None:
    with serving() as provider:
        config = GatewayConfig(upstream=provider.url, app="desk")
        with running_gateway(config, collector.url) as one, running_gateway(config, collector.url) as two:
            for number, gateway in enumerate((one, two)):
                with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="k", max_retries=0) as client:
                    client.chat.completions.create(model="m", messages=[{"role": "user", "content": f"hello {number}"}])
    assert sender(collector.url, "desk").flush(10)
    with open_store(records, read_only=True) as store:
        calls = [call for episode in store.episodes() for call in store.calls(episode.id)]
        assert sorted(call.candidates[0].text for call in calls) == ["re: hello 0", "re: hello 1"]
