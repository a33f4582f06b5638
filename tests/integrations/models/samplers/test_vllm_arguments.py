"""The arguments that vLLM starts with, checked by vLLM's own configuration as on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cotune.integrations.models.vllm.arguments import EngineSize, engine_arguments
from tests.integrations import tiny_models

SIZE = EngineSize(sequences=512, adapters=5, rank=16)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    tiny_models.build("qwen3", folder)
    return folder


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let vLLM's CPU build plan for a GPU of so many GiB."""
    from vllm.platforms import current_platform

    def pretend(gib: int, name: str) -> None:
        monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
        monkeypatch.setattr(current_platform, "is_sleep_mode_available", lambda: True)
        monkeypatch.setattr(current_platform, "get_device_total_memory", lambda device=0: gib << 30)
        monkeypatch.setattr(current_platform, "get_device_name", lambda device=0: name)

    return pretend


def planned(folder: Path, size: EngineSize, user: dict[str, Any], *, on_gpu: bool = True) -> Any:
    """vLLM's configuration of an engine."""
    from vllm import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    # PublishedWeights and CotuneWorker are registered in vLLM's workers, which do not start here.
    arguments = engine_arguments(str(folder), size, user, gpu=on_gpu)
    context = UsageContext.LLM_CLASS if on_gpu else UsageContext.ENGINE_CONTEXT
    return AsyncEngineArgs(**arguments).create_engine_config(context)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gib", "name", "tokens"),
    [
        (8, "NVIDIA GeForce RTX 4060", 8192),
        (22, "NVIDIA L4", 8192),
        (48, "NVIDIA L40S", 8192),
        (80, "NVIDIA A100-SXM4-80GB", 8192),
        (80, "NVIDIA H100 80GB HBM3", 16384),
        (141, "NVIDIA H200", 16384),
    ],
)
def test_vllm_plans_for_the_candidates_in_flight(qwen3: Path, gpu: Any, gib: int, name: str, tokens: int) -> None:
    import torch

    gpu(gib, name)
    plan = planned(qwen3, EngineSize(sequences=512, adapters=5, rank=16, sleeps=True), {})
    assert plan.scheduler_config.max_num_seqs == 512
    assert plan.scheduler_config.max_num_batched_tokens == tokens
    assert plan.scheduler_config.enable_chunked_prefill
    assert plan.model_config.dtype == torch.bfloat16
    assert plan.model_config.head_dtype == torch.float32
    assert plan.model_config.original_max_model_len == -1
    assert plan.model_config.enable_sleep_mode
    assert (plan.lora_config.max_loras, plan.lora_config.max_lora_rank) == (6, 16)


@pytest.mark.slow
def test_vllm_takes_the_users_arguments_instead(qwen3: Path, gpu: Any) -> None:
    import torch

    gpu(80, "NVIDIA H100")
    user = {"max_num_seqs": 7, "max_model_len": 64, "max_num_batched_tokens": 4096, "hf_overrides": {"pad_token_id": 1}}
    plan = planned(qwen3, SIZE, user)
    assert (plan.scheduler_config.max_num_seqs, plan.scheduler_config.max_num_batched_tokens) == (7, 4096)
    assert plan.model_config.max_model_len == 64
    assert plan.model_config.head_dtype == torch.float32
    assert plan.model_config.hf_config.pad_token_id == 1
    plan = planned(qwen3, SIZE, {"hf_overrides": {"head_dtype": "model"}})
    assert plan.model_config.head_dtype == torch.bfloat16


@pytest.mark.slow
def test_vllm_on_a_cpu_plans_in_float32_without_chunks(qwen3: Path) -> None:
    import torch

    plan = planned(qwen3, SIZE, {}, on_gpu=False)
    assert plan.model_config.dtype == plan.model_config.head_dtype == torch.float32
    assert plan.scheduler_config.max_num_seqs == 512
    assert not plan.scheduler_config.enable_chunked_prefill
    assert plan.scheduler_config.max_num_batched_tokens >= plan.model_config.max_model_len


@pytest.mark.parametrize(("asked", "sequences"), [(0, 128), (4, 128), (512, 512), (100_000, 1024)])
def test_sequences_at_once_stay_within_bounds(asked: int, sequences: int) -> None:
    assert engine_arguments("m", EngineSize(sequences=asked), {}, gpu=True)["max_num_seqs"] == sequences


def test_engines_of_several_gpus_start_their_own_workers() -> None:
    alone = engine_arguments("m", SIZE, {"tensor_parallel_size": 1}, gpu=True)
    assert "distributed_executor_backend" not in alone
    parallel = engine_arguments("m", SIZE, {"tensor_parallel_size": 2}, gpu=True)
    assert parallel["distributed_executor_backend"] == "mp"
    told = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
    assert engine_arguments("m", SIZE, told, gpu=True)["distributed_executor_backend"] == "ray"


def test_an_engine_of_full_weights_has_no_adapters() -> None:
    arguments = engine_arguments("m", EngineSize(full=True), {}, gpu=False)
    assert arguments["weight_transfer_config"] == {"backend": "cotune"}
    assert "enable_lora" not in arguments


def test_a_gpu_without_bfloat16_samples_in_float32() -> None:
    assert engine_arguments("m", SIZE, {}, gpu=True)["dtype"] == "bfloat16"
    assert engine_arguments("m", SIZE, {}, gpu=True, bfloat16=False)["dtype"] == "float32"
