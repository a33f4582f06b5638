"""The in-process engine by torch's own rules for a GPU, on tensors without numbers: see `fake_gpu`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from cotune.integrations.models.float32 import widen_logits
from cotune.integrations.models.folder.adapter import read_adapter
from cotune.integrations.models.transformers.batch import BASE, Batch
from cotune.integrations.models.transformers.prefixes import PrefixCache
from cotune.integrations.models.transformers.rows import Job
from cotune.records.policies import LoraSpec
from cotune.sampling.protocol import SamplingParams
from tests.fake_gpu import HostWaits, fake_gpu
from tests.integrations import tiny_models

STEPS = 6
PARAMS = {
    "plain": SamplingParams(max_tokens=20),
    "greedy": SamplingParams(max_tokens=20, temperature=0.0),
    "truncated": SamplingParams(max_tokens=20, temperature=0.7, top_k=5, top_p=0.9, min_p=0.01),
    "biased": SamplingParams(max_tokens=20, logit_bias=((3, 1.0), (4, -1.0))),
    "penalized": SamplingParams(max_tokens=20, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.1),
    "likeliest": SamplingParams(max_tokens=20, top_logprobs=3),
}


@pytest.fixture
def gpu() -> Iterator[HostWaits]:
    with fake_gpu() as waits:
        yield waits


def batch_of(dtype: torch.dtype) -> Batch:
    with torch.device("cuda"):
        model = Qwen3ForCausalLM._from_config(tiny_models.config("qwen3", 512), dtype=dtype).eval()
    widen_logits(model)
    return Batch(model, (), prefixes=PrefixCache(1 << 24))


def adapter(batch: Batch) -> Any:
    stem = "base_model.model.model.layers.0.self_attn.q_proj"
    layer = batch.model.model.layers[0].self_attn.q_proj
    weights = {
        f"{stem}.lora_A.weight": np.zeros((4, layer.in_features), np.float32),
        f"{stem}.lora_B.weight": np.zeros((layer.out_features, 4), np.float32),
    }
    return read_adapter(weights, LoraSpec(rank=4), batch.model)


def waits_of_engine(gpu: HostWaits) -> list[str]:
    """All waits but those inside the model library's prefill, which makes tensors of one number on the GPU."""
    return [name for name in gpu.names if "to the GPU integrations/models/transformers/prefill.py" not in name]


# Inference mode has rules of its own, which fake tensors do not know.
admit = torch.no_grad()(Batch.admit.__wrapped__)  # type: ignore[attr-defined]
step = torch.no_grad()(Batch.step.__wrapped__)  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sampling", PARAMS)
def test_decoding_stays_on_the_gpu_and_waits_once_per_step(gpu: HostWaits, sampling: str, dtype: torch.dtype) -> None:
    batch, params = batch_of(dtype), PARAMS[sampling]
    batch.lora.add(1, adapter(batch))
    gpu.names.clear()
    prompts = [tuple(range(5, 12)), tuple(range(5, 30))]
    asked = [(prompts[0], BASE), (prompts[1], BASE), (prompts[1], 1)]
    admit(batch, [Job(id, prompt, 3, params, kind, 20, id) for id, (prompt, kind) in enumerate(asked)])
    assert (batch.rows, len(waits_of_engine(gpu))) == (9, 1), gpu.names
    gpu.names.clear()
    for _ in range(STEPS):
        step(batch)
    assert (batch.rows, len(waits_of_engine(gpu))) == (9, STEPS), gpu.names
    assert batch.cache.layers[0].keys.is_cuda and batch.cache.layers[0].keys.dtype == dtype
    # The same prompt again, which begins with keys and values that are kept by now.
    admit(batch, [Job(9, (*prompts[1], 7), 2, params, BASE, 20, 9)])
    assert batch.prefixes.reused > 0
    step(batch)
    assert (batch.rows, len(waits_of_engine(gpu))) == (11, STEPS + 2), gpu.names


def test_the_engine_does_not_wait_for_the_gpu_when_it_keeps_the_tokens_of_a_candidate_that_has_ended(
    gpu: HostWaits,
) -> None:
    batch = batch_of(torch.float32)
    gpu.names.clear()
    prompt = tuple(range(5, 12))
    admit(batch, [Job(0, prompt, 2, PARAMS["plain"], BASE, 3, 0), Job(1, prompt, 1, PARAMS["plain"], BASE, 20, 1)])
    before = batch.prefixes.bytes
    for _ in range(STEPS):
        step(batch)
    assert batch.alive == 1 and batch.prefixes.bytes > before
    assert len(waits_of_engine(gpu)) == 1 + STEPS, gpu.names
