"""Frozen layers and their adapters in one step: gradients of PEFT's own layers, and bfloat16 where a CPU has it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cotune.algorithms.recipes import LossSpec
from cotune.algorithms.samples import TrainRow
from cotune.config.train import TrainConfig
from cotune.integrations.models import bfloat16
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.integrations.models.transformers.engine import load
from cotune.integrations.models.transformers.sampler import TransformersSampler
from cotune.integrations.models.transformers.wire import ModelSource
from cotune.records.policies import policies_for
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import SamplingParams
from cotune.trainer.before.doctor.model_size import measure_folder
from cotune.trainer.learner.load import open_policy_models
from cotune.trainer.learner.local import LocalLearner
from cotune.trainer.learner.memory import products
from cotune.trainer.learner.memory.adapter_copies import AdapterCopies
from cotune.trainer.learner.memory.pass_size import kept_bytes
from cotune.trainer.learner.memory.products import compute_joined
from cotune.trainer.learner.policy_model import PolicyModel
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
    monkeypatch.setattr(products, "join_layers", lambda network, dtype: AdapterCopies([], dtype))
    apart, expected = moved(with_eps(opened(base), 1e-2))
    assert joined["grad_norm"] == pytest.approx(apart["grad_norm"], rel=1e-5)
    for name, array in expected.items():
        np.testing.assert_allclose(weights[name], array, atol=1e-6, err_msg=name)


def test_the_adapters_of_all_roles_stay_in_float32(base: str) -> None:
    """Only the first one is active when layers are joined, and PEFT has frozen the others until then."""
    policies = policies_for("lora", ["a", "b"], SMALL)
    models = open_policy_models(base, policies, change(FAST, dtype="bfloat16"), reference=[])
    compute_joined(models["a"].logprob_model, "bfloat16")
    for model in models.values():
        assert {parameter.dtype for parameter in model.parameters().values()} == {torch.float32}
        model.token_logprobs(make_rows())[0].sum().backward()
        assert {parameter.grad.dtype for parameter in model.parameters().values()} == {torch.float32}


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
    assert size.token_bytes == pytest.approx(kept_bytes(model, checkpointed=False).token, rel=0.1)
    assert not measure_folder(Path(base), SMALL, "float32", joined=True).rounded


def state_gradients(policy: PolicyModel, rows: Sequence[TrainRow]) -> torch.Tensor:
    """The gradients of an adapter, one after the other, of states that are weighted by fixed numbers."""
    policy.activate()
    states = policy.logprob_model.states(rows)
    factors = torch.randn(states.shape, generator=torch.Generator().manual_seed(5)).to(states.dtype)
    found = torch.autograd.grad((states * factors).sum(), list(policy.parameters().values()))
    return torch.cat([gradient.detach().double().flatten() for gradient in found])


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_without_autocast_gradients_are_as_exact_as_with_it(base: str, shared: bool, checkpointed: bool) -> None:
    """As a GPU computes in bfloat16, against PEFT's layers under autocast, and against float64."""
    found: dict[str, torch.Tensor] = {}
    for kind in ("float64", "autocast", "joined"):
        dtype = "float32" if kind == "float64" else "bfloat16"
        settings = change(FAST, dtype=dtype, shared_prompts=shared)
        policy = open_policy_models(base, policies_for("lora", ["a"], SMALL), settings, reference=())["a"]
        generator = torch.Generator().manual_seed(3)
        for parameter in policy.parameters().values():  # one of the two factors is 0 at first
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
        model = policy.logprob_model
        if kind == "float64":
            model.network.bfloat16().double()
        if kind == "joined":
            model.use_copies(products.join_layers(model.network, torch.bfloat16))
            assert not model._autocast
        model.checkpointing.on = checkpointed
        found[kind] = state_gradients(policy, make_rows())
    exact = found["float64"]
    errors = {kind: float((found[kind] - exact).norm() / exact.norm()) for kind in ("autocast", "joined")}
    assert 0 < errors["joined"] < 1.2 * errors["autocast"] < 0.1, errors


def test_copies_of_an_adapter_are_those_of_its_latest_weights(base: str) -> None:
    policy = open_policy_models(base, policies_for("lora", ["a"], SMALL), change(FAST, dtype="bfloat16"), reference=())[
        "a"
    ]
    copies = products.join_layers(policy.network, torch.bfloat16)
    copies.refresh()
    matrix = next(iter(policy.parameters().values()))
    first = copies.of(matrix)
    assert first.dtype == torch.bfloat16 and copies.of(matrix) is first
    with torch.no_grad():
        matrix.mul_(3.0)
    assert torch.equal(copies.of(matrix), matrix.bfloat16())  # changed since
    copies.refresh()
    assert torch.equal(copies.of(matrix), matrix.bfloat16()) and copies.of(matrix) is not first


def test_weights_in_another_precision_keep_autocast(base: str) -> None:
    policy = open_policy_models(base, policies_for("lora", ["a"], SMALL), change(FAST, dtype="bfloat16"), reference=())[
        "a"
    ]
    model = policy.logprob_model
    assert model._autocast  # adapters of PEFT
    copies = products.join_layers(policy.network, torch.bfloat16)
    policy.network.model.norm.float()
    model.use_copies(copies)
    assert model._autocast
    full = open_policy_models(base, policies_for("full", ["a"], SMALL), change(FAST, dtype="bfloat16"), reference=())[
        "a"
    ]
    assert full.logprob_model._autocast
