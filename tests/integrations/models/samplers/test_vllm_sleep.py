"""How an engine on a GPU sleeps, with or without its weights: vLLM's allocator with pretended memory."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cotune.integrations.models.vllm import engine as vllm_engine
from cotune.integrations.models.vllm.arguments import EngineSize
from cotune.integrations.models.vllm.engine import VllmSampler

WEIGHTS, CACHE = 1, 2
"""The addresses of the two allocations."""


class Gpu:
    """vLLM's `CuMemAllocator` over two allocations; `mapped` are those that are on the GPU, `copies` those that were
    copied to the host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm import device_allocator
        from vllm.device_allocator import AllocationData, cumem

        self.mapped = {WEIGHTS, CACHE}
        self.copies: list[int] = []
        self.allocator = object.__new__(cumem.CuMemAllocator)
        sizes = {WEIGHTS: ("weights", 8), CACHE: ("kv_cache", 64)}
        self.allocator.pointer_to_data = {
            address: AllocationData((0, size, address, 0), tag) for address, (tag, size) in sizes.items()
        }
        monkeypatch.setattr(cumem, "unmap_and_release", lambda handle: self.mapped.remove(handle[2]))
        monkeypatch.setattr(cumem, "create_and_map", lambda handle: self.mapped.add(handle[2]))
        monkeypatch.setattr(cumem, "PIN_MEMORY", False)
        copy = SimpleNamespace(cudaMemcpy=lambda target, source, size: self.copies.append(size))
        monkeypatch.setattr(cumem, "libcudart", copy)
        monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: None)
        monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(device_allocator, "get_mem_allocator_instance", lambda: self.allocator)


class Llm:
    """vLLM's front: it takes orders for one worker, and answers nothing while it is paused."""

    errored = False

    def __init__(self, gpu: Gpu) -> None:
        from cotune.integrations.models.vllm.worker import CotuneWorker

        self.gpu, self.paused = gpu, False
        self.worker = CotuneWorker()
        self.worker.wake_up = gpu.allocator.wake_up

    async def pause_generation(self, **how: Any) -> None:
        assert how == {"mode": "wait", "clear_cache": True}
        self.paused = True

    async def resume_generation(self) -> None:
        self.paused = False

    async def sleep(self, level: int, mode: str) -> None:
        assert (level, mode) == (1, "wait")
        self.paused = True
        self.gpu.allocator.sleep(("weights",))

    async def wake_up(self, tags: list[str]) -> None:
        self.gpu.allocator.wake_up(tags)
        if self.gpu.mapped == {WEIGHTS, CACHE}:
            self.paused = False

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[str]:
        if method == "cotune_model":
            assert WEIGHTS in self.gpu.mapped
            return ["digest"]
        return [getattr(self.worker, method)(*args)]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    monkeypatch.setattr(vllm_engine, "on_gpu", lambda: True)
    return Gpu(monkeypatch)


@pytest.mark.slow  # imports vLLM
@pytest.mark.parametrize(
    ("calls", "left", "copied"),
    [([True], {WEIGHTS}, 0), ([True, True], {WEIGHTS}, 0), ([False], set(), 1), ([True, False, False], set(), 1)],
    ids=["beside the weights", "twice", "alone", "alone after all"],
)
def test_an_engine_sleeps_with_or_without_its_weights_and_wakes_as_it_was(
    gpu: Gpu, calls: list[bool], left: set[int], copied: int
) -> None:
    async def scenario() -> None:
        sampler = VllmSampler(None, EngineSize(sleeps=True))  # type: ignore[arg-type]
        sampler._llm = Llm(gpu)
        for _ in range(2):
            gpu.copies.clear()
            for keep_weights in calls:
                await sampler.sleep(keep_weights)
            assert sampler._llm.paused
            assert gpu.mapped == left
            assert len(gpu.copies) == copied
            await sampler.wake()
            assert not sampler._llm.paused
            assert gpu.mapped == {WEIGHTS, CACHE}
            assert len(gpu.copies) == 2 * copied

    asyncio.run(scenario())
