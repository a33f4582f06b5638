"""The arguments that vLLM's engine starts with. The user's `engine_args` replace any of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

WORKER = "cotune.integrations.models.vllm.worker.CotuneWorker"
BACKEND = "cotune-folder"

LEAST_SEQUENCES = 128
"""An application may make several calls of an episode at once, so an engine takes at least this many sequences."""
MOST_SEQUENCES = 1024
"""vLLM's own figure for an H100: logits and sampling of more take several GB at large vocabularies."""
AS_MEMORY_ALLOWS = -1
"""As vLLM's `max_model_len`: the model's own length, or as many tokens as one sequence can have in the cache."""


class EngineSize(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine must hold at once."""

    sequences: int = 0
    """Sequences decoded at once; 0: not known."""
    adapters: int = 1
    rank: int = 8
    """Of the largest adapter: one of the ranks that vLLM has kernels for."""
    full: bool = False
    """Whether it serves full weights instead of adapters."""
    sleeps: bool = False


def engine_arguments(
    model: str, size: EngineSize, user: Mapping[str, Any], *, gpu: bool, bfloat16: bool = True
) -> dict[str, Any]:
    """Arguments of `AsyncEngineArgs`; those in `user` win. `bfloat16` says whether the GPU multiplies it."""
    arguments: dict[str, Any] = {
        "model": model,
        "dtype": "bfloat16" if gpu and bfloat16 else "float32",
        "enforce_eager": not gpu,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "worker_extension_cls": WORKER,
        # The one whose grammars the learner makes again from what was recorded.
        "structured_outputs_config": {"backend": "guidance"},
        "max_num_seqs": min(MOST_SEQUENCES, max(LEAST_SEQUENCES, size.sequences)),
        "max_model_len": AS_MEMORY_ALLOWS,
    }
    if not gpu:
        # A seeded request whose prompt is computed in parts kills the engine: CPU generators have no offset.
        arguments["enable_chunked_prefill"] = False
    elif size.sleeps:
        arguments["enable_sleep_mode"] = True
    if size.full:
        arguments["weight_transfer_config"] = {"backend": BACKEND}
    else:
        arguments["enable_lora"] = True
        # The last slot stays empty: on CPUs, vLLM gives requests of the base what stands in it.
        arguments["max_loras"] = arguments["max_cpu_loras"] = size.adapters + 1
        arguments["max_lora_rank"] = size.rank
    parallel = user.get("tensor_parallel_size", 1) * user.get("pipeline_parallel_size", 1)
    if parallel > 1:
        # Inside a Ray actor vLLM might take Ray for its own workers; they belong to this actor's GPUs.
        arguments["distributed_executor_backend"] = "mp"

    # Logits in float32, as in the learner: vLLM rounds them to the model's precision otherwise.
    overrides = user.get("hf_overrides", {})
    if isinstance(overrides, Mapping):
        user = {**user, "hf_overrides": {"head_dtype": "float32", **overrides}}
    return {**arguments, **user}
