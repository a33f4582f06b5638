"""Frozen layers and their adapters in one step: gradients of PEFT's own layers, and bfloat16 where a CPU has it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cotune.algorithms.recipes import LossSpec
from cotune.integrations.models import bfloat16
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.integrations.models.transformers.engine import load
from cotune.integrations.models.transformers.sampler import TransformersSampler
from cotune.integrations.models.transformers.wire import ModelSource
from cotune.records.policies import policies_for
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import SamplingParams
from cotune.trainer.before.doctor.model_size import measure_folder
from cotune.trainer.config.train import TrainConfig
from cotune.trainer.learner.local import LocalLearner
from cotune.trainer.learner.memory import products
from cotune.trainer.learner.memory.pass_size import bytes_per_token
from cotune.trainer.publish import Probe, sampled_gaps
from tests.trainer.learner.fsdp_ranks import with_eps
from tests.trainer.learner.learner_rows import FAST, SMALL, change, make_rows, snapshot

ROUNDING = pytest.mark.skipif(not bfloat16.has_bfloat16(), reason="this processor does not multiply bfloat16")


def opened(base: str | Path, **settings: Any) -> LocalLearner:
    return LocalLearner.open(str(base), policies_for("lora", ["a"], SMALL), change(FAST, **settings), LossSpec())


def moved(learner: LocalLearner) -> tuple[Mapping[str, float], Mapping[str, Any]]:
    """Figures of a second update, in which both factors of each adapter have gradients, and the weights after it."""
    learner.update("a", make_rows())
    return learner.update("a", make_rows(seed=1)), snapshot(learner, "a")


def test_gradients_are_those_of_peft(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    joined, weights = moved(with_eps(opened(base), 1e-2))
    monkeypatch.setattr(products, "join_layers", lambda network, dtype: None)
    apart, expected = moved(with_eps(opened(base), 1e-2))
    assert joined["grad_norm"] == pytest.approx(apart["grad_norm"], rel=1e-5)
    for name, array in expected.items():
        np.testing.assert_allclose(weights[name], array, atol=1e-6, err_msg=name)


@ROUNDING
def test_in_bfloat16_gradients_are_near_and_equal_in_each_run(base: str) -> None:
    exact, _ = moved(opened(base))
    first, weights = moved(opened(base, dtype="bfloat16"))
    again, same = moved(opened(base, dtype="bfloat16"))
    assert first["grad_norm"] == pytest.approx(exact["grad_norm"], rel=2e-2)
    assert first["grad_norm"] != exact["grad_norm"]
    assert first["grad_norm"] == again["grad_norm"]
    assert all(np.array_equal(array, same[name]) for name, array in weights.items())
    assert all(array.dtype == np.float32 for array in weights.values())


@ROUNDING
def test_a_learner_goes_on_in_bfloat16_to_the_bit(base: str, tmp_path: Path) -> None:
    learner = opened(base, dtype="bfloat16")
    learner.update("a", make_rows())
    learner.save(tmp_path)
    learner.update("a", make_rows(seed=1))
    other = opened(base, dtype="bfloat16")
    other.load(tmp_path)
    other.update("a", make_rows(seed=1))
    expected = snapshot(learner, "a")
    assert all(np.array_equal(array, expected[name]) for name, array in snapshot(other, "a").items())


@ROUNDING
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sampler_and_learner_multiply_in_the_precision_that_is_asked_for(base: str, dtype: str) -> None:
    learner = opened(base, dtype=dtype)
    layers = {p.dtype for name, p in learner._policies["a"].network.named_parameters() if "base_layer" in name}
    assert layers == {getattr(torch, dtype)}
    engine = load(ModelSource(base, "cpu", dtype, 1, 16, 1 << 16, None, (0,)), lambda _: None)
    packed = [module for module in engine._base.model.modules() if isinstance(module, bfloat16.PackedLinear)]
    assert bool(packed) == (dtype == "bfloat16")


@ROUNDING
def test_logits_are_not_rounded() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((1000, 64), generator=generator).bfloat16()
    states = torch.randn((7, 64), generator=generator).bfloat16()
    expected = states.double() @ weight.double().T
    packed = bfloat16.pack(weight)
    assert (bfloat16.exact_product(states, packed) - expected).abs().max() < 1e-3
    assert (bfloat16.product(states, packed) - expected).abs().max() > 1e-2


@ROUNDING
@pytest.mark.slow
def test_sampler_and_learner_agree_on_pretrained_weights(smollm2: Path) -> None:
    learner = opened(smollm2, dtype="bfloat16")
    weights = {name: array + np.float32(0.01) * ("lora_B" in name) for name, array in learner.weights("a").items()}
    learner.adopt("a", weights)
    prompt = ChatTemplate.load(smollm2).render([{"role": "user", "content": "Tell me about rivers."}], None)

    async def measure() -> np.ndarray:
        sampler = await TransformersSampler.open(smollm2, dtype="bfloat16", host="thread", device="cpu")
        await sampler.publish(PolicyRef("a", 1), weights, SMALL)
        probe = Probe([prompt], lambda rows: learner.logprobs("a", rows))
        gaps = await sampled_gaps(sampler, PolicyRef("a", 1), probe, SamplingParams(max_tokens=32, seed=0))
        await sampler.aclose()
        return gaps

    assert 1e-4 < asyncio.run(measure()).mean() < TrainConfig(model="m").probe_bound


@ROUNDING
def test_the_forecast_of_memory_knows_rounded_layers(base: str) -> None:
    model = opened(base, dtype="bfloat16")._policies["a"]
    size = measure_folder(Path(base), SMALL, "bfloat16", joined=True)
    held = sum(p.nbytes for name, p in model.network.named_parameters() if "lora_" not in name)
    assert size.rounded
    assert size.rounded_bytes(2) == pytest.approx(held + 4 * size.head, rel=0.02)
    assert size.token_bytes == pytest.approx(bytes_per_token(model, checkpointed=False), rel=0.1)
    assert not measure_folder(Path(base), SMALL, "float32", joined=True).rounded
