"""Steps of the usual decoders against those of the model library's own layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from cotune.integrations.models.bfloat16 import pack_linear_layers
from cotune.integrations.models.folder.adapter import read_adapter
from cotune.integrations.models.transformers import attention
from cotune.integrations.models.transformers.attention import SharedColumns
from cotune.integrations.models.transformers.batch import BASE, Batch
from cotune.integrations.models.transformers.cache import RowCache
from cotune.integrations.models.transformers.decode import DecodeStep, is_usual
from cotune.integrations.models.transformers.rows import Job
from cotune.records.policies import LoraSpec
from cotune.sampling.protocol import Completion, SamplingParams

SHAPE: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SCALED = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(
        **SHAPE,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters={**SCALED, "original_max_position_embeddings": 16},
        max_position_embeddings=128,
    ),
    "mistral": lambda: MistralConfig(**SHAPE, head_dim=32, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=24),
}
JOBS = [((5, 6, 7, 8, 9), 3, 9, 1), ((7, 8), 1, 4, BASE), (tuple(range(9, 30)), 2, 12, 2), ((7, 8), 2, 12, 2)]
"""Prompt, candidates, tokens and adapter of each."""


def built(config: PretrainedConfig) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))  # biases and norms are no zeros and ones
    return model


def weights(model: Any, targets: tuple[str, ...], seed: int, rank: int = 4) -> dict[str, Any]:
    chance, found = np.random.default_rng(seed), {}
    for name, module in model.named_modules():
        if name.endswith(targets):
            size = module.in_features, module.out_features
            found[f"base_model.model.{name}.lora_A.weight"] = 0.1 * chance.standard_normal((rank, size[0]))
            found[f"base_model.model.{name}.lora_B.weight"] = 0.1 * chance.standard_normal((size[1], rank))
    return {name: array.astype(np.float32) for name, array in found.items()}


ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def replies(kind: str, *, library: bool = False) -> list[Completion]:
    """What two adapters and the base reply, rows of different lengths together."""
    batch = Batch(built(CONFIGS[kind]()), ())
    assert isinstance(batch._step, DecodeStep)
    if library:
        batch._step = batch._library_step
    return decoded(batch)


def decoded(batch: Batch) -> list[Completion]:
    for adapter, targets in ((1, ALL), (2, ("q_proj", "v_proj", "up_proj"))):
        spec = LoraSpec(rank=4, alpha=8.0, targets=targets)
        batch.lora.add(adapter, read_adapter(weights(batch.model, targets, adapter), spec, batch.model))
    jobs = [
        Job(i, prompt, n, SamplingParams(temperature=0.7), adapter, limit, seed=i)
        for i, (prompt, n, limit, adapter) in enumerate(JOBS)
    ]
    batch.admit(jobs[:2])
    batch.step()
    batch.admit(jobs[2:])
    while batch.rows:
        batch.step()
    return [one for job in jobs for one in job.done if one is not None]


@pytest.mark.parametrize("alike", [False, True], ids=["apart", "alike"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_step_is_that_of_the_library(kind: str, alike: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if alike:
        monkeypatch.setattr(attention, "WORTH", 0)
    own, library = replies(kind), replies(kind, library=True)
    assert len(own) == sum(n for _, n, _, _ in JOBS)
    assert [one.token_ids for one in own] == [one.token_ids for one in library]
    for one, other in zip(own, library, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.usefixtures("bfloat16_products")
@pytest.mark.parametrize("kind", CONFIGS)
def test_in_bfloat16_it_differs_by_roundings(kind: str) -> None:
    model = built(CONFIGS[kind]())
    pack_linear_layers(model)
    batch, gaps = Batch(model, ()), list[float]()
    own = batch._step
    assert isinstance(own, DecodeStep)

    def both(tokens: torch.Tensor, cache: RowCache, shared: SharedColumns | None) -> torch.Tensor:
        """Each writes the same column of the cache; the library's logits are drawn from."""
        found = own(tokens, cache, shared)
        logits: torch.Tensor = batch._library_step(tokens, cache, shared)
        gaps.append(float((found - logits).abs().max() / logits.std()))
        return logits

    batch._step = both
    decoded(batch)
    assert len(gaps) > 10
    assert max(gaps) < 0.05


def test_models_that_compute_something_else_keep_their_own_layers() -> None:
    gemma = built(Gemma2Config(**SHAPE, head_dim=16, layer_types=["full_attention"] * 3))
    sliding = {"layer_types": ["sliding_attention"] * 3, "sliding_window": 8, "use_sliding_window": True}
    windows = built(Qwen3Config(**SHAPE, **sliding))
    changed = built(CONFIGS["llama"]())
    assert is_usual(changed)
    changed.__class__ = type("LlamaForCausalLM", (type(changed),), {"__module__": "modeling_of_a_folder"})
    for model in (gemma, windows, changed):
        assert not isinstance(Batch(model, ())._step, DecodeStep)
