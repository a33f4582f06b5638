"""The arguments with which vLLM's engine starts. The user's `engine_args` replace any of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

WORKER = "cotune.integrations.models.vllm.worker.CotuneWorker"
BACKEND = "cotune"

LEAST_SEQUENCES = 128
"""An application may make several calls of an episode at once, so an engine takes at least this many sequences."""
MOST_SEQUENCES = 1024
"""vLLM's default on an H100. With more sequences, logits and sampling take several GB for large vocabularies."""
AS_MEMORY_ALLOWS = -1
"""The `max_model_len` with which vLLM takes the model's length, or fewer tokens if the cache cannot hold so many."""


class EngineSize(msgspec.Struct, frozen=True, kw_only=True):
    """The size for which an engine is started."""

    sequences: int = 0
    """The number of sequences that are decoded at once; 0 if it is not known."""
    adapters: int = 1
    """The number of adapters that are loaded at once."""
    rank: int = 8
    """The largest rank of an adapter: one of the ranks for which vLLM has kernels."""
    full: bool = False
    """Whether the engine serves full weights instead of adapters."""
    sleeps: bool = False
    """Whether the engine gives its memory to a learner from time to time."""


def engine_arguments(
    model: str, size: EngineSize, user: Mapping[str, Any], *, gpu: bool, bfloat16: bool = True
) -> dict[str, Any]:
    """Arguments of `AsyncEngineArgs`. The arguments in `user` have precedence. `bfloat16` says whether the GPU can
    multiply it."""
    arguments: dict[str, Any] = {
        "model": model,
        "dtype": "bfloat16" if gpu and bfloat16 else "float32",
        "enforce_eager": not gpu,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "worker_extension_cls": WORKER,
        # The learner compiles recorded grammars with the same library.
        "structured_outputs_config": {"backend": "guidance"},
        "max_num_seqs": min(MOST_SEQUENCES, max(LEAST_SEQUENCES, size.sequences)),
        "max_model_len": AS_MEMORY_ALLOWS,
    }
    if not gpu:
        # The engine dies of a request with a seed whose prompt is computed in parts: CPU generators have no offset.
        arguments["enable_chunked_prefill"] = False
    elif size.sleeps:
        arguments["enable_sleep_mode"] = True
    if size.full:
        arguments["weight_transfer_config"] = {"backend": BACKEND}
    else:
        arguments["enable_lora"] = True
        # The last slot must be empty: on CPUs, vLLM applies it to requests of the base.
        arguments["max_loras"] = arguments["max_cpu_loras"] = size.adapters + 1
        arguments["max_lora_rank"] = size.rank
    parallel = user.get("tensor_parallel_size", 1) * user.get("pipeline_parallel_size", 1)
    if parallel > 1:
        # Inside a Ray actor, vLLM might start its workers with Ray, which could give them other GPUs.
        arguments["distributed_executor_backend"] = "mp"

    # The learner computes logits in float32. vLLM would round them to the model's precision.
    overrides = user.get("hf_overrides", {})
    if isinstance(overrides, Mapping):
        user = {**user, "hf_overrides": {"head_dtype": "float32", **overrides}}
    return {**arguments, **user}
