"""Without vLLM: GPUs that are missing or would be idle, the report of a long start, and adapters after a sleep."""

from __future__ import annotations

import asyncio
import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from cotune.errors import ConfigError, SamplerError
from cotune.integrations.models.served_versions import Version
from cotune.integrations.models.vllm import engine as vllm_engine
from cotune.integrations.models.vllm.arguments import EngineSize
from cotune.integrations.models.vllm.device import check_gpu
from cotune.integrations.models.vllm.engine import VllmSampler
from cotune.integrations.models.vllm.slots import slot_digest
from cotune.records.structs import PolicyRef


def test_an_engine_for_gpus_that_is_given_none_is_told_of_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    platforms: Any = ModuleType("vllm.platforms")
    platforms.current_platform = SimpleNamespace(is_cpu=lambda: False, is_cuda_alike=lambda: True)
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="engine = 'vllm' was built for GPUs, and torch can use none"):
        check_gpu()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check_gpu()


def test_gpus_that_a_vllm_for_the_cpu_would_leave_idle_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    platforms: Any = ModuleType("vllm.platforms")
    platforms.current_platform = SimpleNamespace(is_cpu=lambda: True, is_cuda_alike=lambda: False)
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    with pytest.raises(ConfigError, match="engine = 'vllm' was built for the CPU, and the run has 2 GPU"):
        check_gpu(2)
    check_gpu(0)


def test_the_seconds_of_a_long_start_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm_engine, "START_REPORT_SECONDS", 0.01)
    with vllm_engine.reported_start(gpu=True):
        while not caplog.records:
            time.sleep(0.01)
    assert "vLLM is starting: 0 s so far" in caplog.records[0].getMessage()
    logged = len(caplog.records)
    time.sleep(0.05)
    assert len(caplog.records) == logged


class Layer:
    def __init__(self) -> None:
        self.lora_a_stacked = (torch.zeros(3, 1, 2, 4),)
        self.lora_b_stacked = (torch.zeros(3, 1, 4, 2),)


class Engine:
    """vLLM's engine with two adapters in slots, of which the second is lost in its sleep."""

    errored = False

    def __init__(self, loses: str) -> None:
        self.loses = loses
        self.manager = SimpleNamespace(lora_index_to_id=[None, 1, 2], modules={"q_proj": Layer(), "v_proj": Layer()})
        for slot in (1, 2):
            self.manager.modules["v_proj"].lora_b_stacked[0][slot].normal_()

    async def pause_generation(self, **how: Any) -> None:
        if self.loses == "values":
            self.manager.modules["v_proj"].lora_b_stacked[0][2] = 0.0
        if self.loses == "slot":
            self.manager.lora_index_to_id[2] = None

    async def resume_generation(self) -> None:
        pass

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[str]:
        return ["weights"] if method == "cotune_model" else [slot_digest(self.manager, *args)]


@pytest.mark.parametrize("loses", ["", "values", "slot"])
def test_an_adapter_that_is_lost_in_its_slot_while_the_engine_sleeps_is_named(
    monkeypatch: pytest.MonkeyPatch, loses: str
) -> None:
    monkeypatch.setattr(vllm_engine, "on_gpu", lambda: False)

    async def scenario() -> None:
        sampler = VllmSampler(None, EngineSize(sleeps=True))  # type: ignore[arg-type]
        sampler._llm = Engine(loses)
        for number, name in enumerate(("kept", "lost"), 1):
            sampler._versions.add(Version(PolicyRef(name, 1), "print", SimpleNamespace(lora_int_id=number)))
            sampler._published_slots[number] = await sampler._ask("cotune_slot", number)
        await sampler.sleep()
        await sampler.wake()

    if loses:
        with pytest.raises(SamplerError, match="woke with other values in the adapters lost@1 than were published"):
            asyncio.run(scenario())
    else:
        asyncio.run(scenario())


def test_a_vllm_whose_slots_have_another_form_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm_engine, "on_gpu", lambda: False)

    async def scenario() -> None:
        sampler = VllmSampler(None, EngineSize(sleeps=True))  # type: ignore[arg-type]
        sampler._llm = Engine("")
        sampler._llm.manager.modules = {"q_proj": SimpleNamespace(packed=torch.ones(3))}
        sampler._versions.add(Version(PolicyRef("a", 1), "print", SimpleNamespace(lora_int_id=1)))
        sampler._published_slots[1] = await sampler._ask("cotune_slot", 1)
        for _ in range(2):
            await sampler.sleep()
            await sampler.wake()

    asyncio.run(scenario())
    assert ["does not show the adapters" in record.getMessage() for record in caplog.records] == [True]


def test_workers_that_hold_a_part_each_go_to_sleep_with_different_digests() -> None:
    async def digest() -> str:
        sampler = VllmSampler(None, EngineSize())  # type: ignore[arg-type]
        sampler._llm = SimpleNamespace(collective_rpc=lambda method, args: asyncio.sleep(0, ["one", "other"]))
        return await sampler._digest()

    assert asyncio.run(digest()) == "one other"
