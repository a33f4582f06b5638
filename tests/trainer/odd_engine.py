"""An engine of one's own: the first sends garbage after some requests, the second hangs, their successors are well."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Sequence
from pathlib import Path

import msgspec

from cotune.config.cluster import ClusterConfig
from cotune.integrations.cluster.router.router import RoutedSampler
from cotune.integrations.models.engines import EngineConfig
from cotune.integrations.models.transformers.sampler import TransformersSampler
from cotune.records.policies import LoraSpec
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import Completion, Sampler, SamplerInfo, SamplingParams, Weights
from cotune.trainer.run.engines import start_engine

WELL = 12
"""Requests that are answered as they should be."""


async def open(model: str, markers: str) -> Sampler:
    """Faults: garbage (token ids that the model lacks), hang (no answer to anything). A file in the folder `markers`
    says that somebody has that fault already."""
    sampler = await TransformersSampler.open(model, threads=1, host="thread", device="cpu")
    for fault in ("garbage", "hang"):
        with contextlib.suppress(FileExistsError):
            (Path(markers) / fault).touch(exist_ok=False)
            return OddSampler(sampler, fault)
    return sampler


async def open_router(cluster: ClusterConfig, engine: EngineConfig, vocabulary: int) -> RoutedSampler:
    """The router of a run, which finds an engine that hangs sooner than usual."""
    make = functools.partial(start_engine, cluster, engine)
    return await RoutedSampler.open([make] * cluster.engines, health_timeout=8.0, vocabulary=vocabulary)


class OddSampler:
    def __init__(self, sampler: TransformersSampler, fault: str) -> None:
        self._sampler = sampler
        self._fault = fault
        self._asked = 0

    async def sample(
        self, prompt_token_ids: Sequence[int], n: int, params: SamplingParams, policy: PolicyRef
    ) -> list[Completion]:
        self._asked += 1
        await self._hang()
        found = await self._sampler.sample(prompt_token_ids, n, params, policy)
        if self._asked <= WELL or self._fault != "garbage":
            return found
        return [msgspec.structs.replace(c, token_ids=tuple(id + 1_000_000 for id in c.token_ids)) for c in found]

    async def publish(self, policy: PolicyRef, weights: Weights, lora: LoraSpec | None = None) -> str:
        await self._hang()
        return await self._sampler.publish(policy, weights, lora)

    async def retire(self, policy: PolicyRef) -> None:
        await self._hang()
        await self._sampler.retire(policy)

    async def info(self) -> SamplerInfo:
        await self._hang()
        return await self._sampler.info()

    async def aclose(self) -> None:
        await self._sampler.aclose()

    async def _hang(self) -> None:
        if self._fault == "hang" and self._asked > WELL:
            await asyncio.Event().wait()
