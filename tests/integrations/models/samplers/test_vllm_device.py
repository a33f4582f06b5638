"""vLLM that was built for GPUs, where there is none for it."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from cotune.errors import ConfigError
from cotune.integrations.models.vllm.arguments import EngineSize
from cotune.integrations.models.vllm.device import check_gpu
from cotune.integrations.models.vllm.engine import VllmSampler


def test_an_engine_for_gpus_that_is_given_none_is_told_of_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    platforms: Any = ModuleType("vllm.platforms")
    platforms.current_platform = SimpleNamespace(is_cpu=lambda: False, is_cuda_alike=lambda: True)
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"cluster\.gpus_per_engine = 0 gives this vLLM no GPU"):
        check_gpu()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check_gpu()


def test_workers_that_hold_a_part_each_go_to_sleep_with_different_digests() -> None:
    async def digest() -> str:
        sampler = VllmSampler(None, EngineSize())  # type: ignore[arg-type]
        sampler._llm = SimpleNamespace(collective_rpc=lambda method, args: asyncio.sleep(0, ["one", "other"]))
        return await sampler._digest()

    assert asyncio.run(digest()) == "one other"
