"""A vLLM sampler that also tells what is inside its engine, for tests that must look."""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec

from cotune.integrations.models.served_versions import Version
from cotune.integrations.models.vllm.engine import VllmSampler
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import SamplerInfo, Weights
from tests.integrations.models.samplers.vllm_server import IN_CORE

_WORKER = {"worker_extension_cls": "tests.integrations.models.samplers.vllm_probe_worker.ProbeWorker"}


class Probe(VllmSampler):
    """`info().counters` also holds the adapters in the engine, the requests of its last step, this process, how many of
    cotune's finders stand on the path of imports in this process and in the workers, and with full weights the
    beginning of the model's digest. It lets the learner send full weights even if it failed before."""

    async def _load_full(self, policy: PolicyRef, weights: Weights) -> Version:
        self._failed_learners.clear()
        return await super()._load_full(policy, weights)

    async def _info(self) -> SamplerInfo:
        loras = set() if self._full else await self._llm.list_loras()
        requests = (await self._ask("cotune_requests"))[0]
        here = sum(type(finder).__module__.startswith("cotune") for finder in sys.meta_path)
        counters = {"adapters": len(loras), "requests": requests, "pid": os.getpid()}
        counters["finders"] = here + sum(await self._ask("cotune_finders"))
        if self._full:
            digests = await self._ask("cotune_model")
            counters["model"] = int("".join(digests)[:12], 16)
        info = await super()._info()
        return msgspec.structs.replace(info, counters={**info.counters, **counters})


class Spoiled(Probe):
    """Its weights change when it has gone to sleep."""

    async def _sleep(self, keep_weights: bool) -> None:
        await super()._sleep(keep_weights)
        await self._ask("cotune_spoil")


async def open_spoiled(engine_args: dict[str, Any], **arguments: Any) -> Spoiled:
    os.environ.update(IN_CORE)
    return await Spoiled.open(engine_args={**engine_args, **_WORKER}, **arguments)


async def open_in_core(engine_args: dict[str, Any], **arguments: Any) -> Probe:
    os.environ.update(IN_CORE)
    return await open(engine_args, **arguments)


async def open(engine_args: dict[str, Any], **arguments: Any) -> Probe:
    return await Probe.open(engine_args={**engine_args, **_WORKER}, **arguments)
