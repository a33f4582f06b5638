"""Fixtures: a provider on a local port, or none at all, and a recorder of episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cotune.integrations.cluster.sampler import RaySampler, start_sampler
from cotune.sampling.protocol import Sampler
from tests.integrations.models.samplers.vllm_server import vllm_server
from tests.integrations.provider import Provider, serving
from tests.integrations.recorded import Recorded


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Iterator[Provider]:
    """What every client reaches that names no address of its own."""
    with serving() as made:
        monkeypatch.setenv("OPENAI_BASE_URL", made.url)
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        monkeypatch.setenv("LANGSMITH_TRACING", "false")
        yield made


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address where nobody listens: whatever is not answered by a responder fails."""
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("LANGSMITH_TRACING", "false")


@pytest.fixture
def record() -> Recorded:
    return Recorded()


@pytest.fixture(scope="session")
def contract_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the model that every sampler is tested with. Its vocabulary is padded."""
    from tests.integrations import tiny_models

    folder = tmp_path_factory.mktemp("contract") / "model"
    tiny_models.build("qwen3", folder, padding=tiny_models.PADDING)
    return folder


@pytest.fixture(scope="session")
def vllm_url(contract_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real `vllm serve` in a process of its own."""
    with vllm_server(contract_model, tmp_path_factory.mktemp("vllm") / "log") as url:
        yield url


@pytest.fixture(scope="session")
def vllm_by_url(ray_runtime: str, vllm_url: str, contract_model: Path) -> Iterator[Sampler]:
    sampler = asyncio.run(client_of(vllm_url, contract_model))
    yield sampler
    asyncio.run(sampler.aclose())


async def client_of(url: str, model: Path) -> Sampler:
    """A client of a server, hosted by an actor."""
    factory = "cotune.integrations.models.vllm.http:VllmHttpSampler.open"
    return await start_sampler(factory, {"url": url, "model": str(model)}, num_cpus=0)


@pytest.fixture(scope="session")
def vllm_in_ray(ray_runtime: str, contract_model: Path) -> Iterator[Sampler]:
    """An engine for adapters in a Ray actor, whose worker is a process of its own."""
    yield from vllm_actor(contract_model, policies=3, max_lora_rank=8, sleeps=True)


@pytest.fixture(scope="session")
def vllm_full(ray_runtime: str, contract_model: Path) -> Iterator[Sampler]:
    """An engine for full weights in a Ray actor."""
    yield from vllm_actor(contract_model, "open_in_core", weights="full")


def vllm_actor(model: Path, opened_by: str = "open", **arguments: Any) -> Iterator[RaySampler]:
    """A vLLM in a Ray actor, opened by a function of `vllm_probe`."""
    arguments = {"model": str(model), "engine_args": {"max_num_seqs": 64}, **arguments}
    sampler = asyncio.run(start_sampler(f"tests.integrations.models.samplers.vllm_probe:{opened_by}", arguments))
    yield sampler
    asyncio.run(sampler.aclose())
