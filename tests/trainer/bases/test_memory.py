"""Each base is in memory once, and each policy computes as it would alone."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from cotune.algorithms.recipes import LossSpec
from cotune.errors import ConfigError
from cotune.integrations.models.engines import EngineConfig
from cotune.integrations.models.per_policy import PolicySampler, open_engines
from cotune.records.policies import LoraSpec, Policies, PolicySpec
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import SamplingParams, fingerprint
from cotune.trainer.learner.load import SEED_STRIDE, open_policy_models
from cotune.trainer.learner.local import LocalLearner
from tests.trainer.learner.learner_rows import FAST, make_rows

LORA = LoraSpec(rank=4, alpha=8.0)
ROWS = [
    msgspec.structs.replace(row, prompt_ids=tuple(id % 30 for id in row.prompt_ids), response_ids=tuple(r))
    for row in make_rows()
    for r in [[id % 30 for id in row.response_ids]]
]


def policies(**models: Path | None) -> Policies:
    specs = {n: PolicySpec(name=n, lora=LORA, model=None if m is None else str(m)) for n, m in models.items()}
    return Policies(specs, {name: name for name in specs})


def gradients(learner: LocalLearner, name: str) -> dict[str, torch.Tensor]:
    """Those of an update of the policy, by the end of the parameters' names: an adapter's name is in the middle."""
    found: dict[str, torch.Tensor] = {}
    parameters = learner._policies[name].parameters()
    for key, parameter in parameters.items():
        key = ".".join(part for part in key.split(".") if not part.startswith("policy"))
        parameter.register_post_accumulate_grad_hook(lambda p, key=key: found.update({key: p.grad.clone()}))
    learner.update(name, ROWS)
    return found


def test_a_policy_learns_as_it_does_alone(tiny_base: Path, other_base: Path) -> None:
    team = LocalLearner.open(str(tiny_base), policies(one=None, two=other_base, three=other_base), FAST, LossSpec())
    models = team._policies
    assert models["two"].network is models["three"].network is not models["one"].network
    for index, (name, base) in enumerate({"one": tiny_base, "two": other_base, "three": other_base}.items()):
        seed = SEED_STRIDE * index
        alone = LocalLearner.open(str(base), policies(**{name: None}), FAST, LossSpec(), seed=seed)
        for before, after in zip(alone.logprobs(name, ROWS), team.logprobs(name, ROWS), strict=True):
            np.testing.assert_array_equal(before, after)
        expected, found = gradients(alone, name), gradients(team, name)
        assert expected.keys() == found.keys() and any(gradient.any() for gradient in found.values())
        for key, gradient in expected.items():
            torch.testing.assert_close(found[key], gradient, rtol=0, atol=0)
        assert fingerprint(team.weights(name)) == fingerprint(alone.weights(name))


def test_adapters_of_one_base_share_an_engine(in_thread: None, tiny_base: Path, other_base: Path) -> None:
    trained = LocalLearner.open(str(other_base), policies(two=None, three=None), FAST, LossSpec())
    for name in ("two", "three"):
        trained.update(name, ROWS)
    greedy, prompt = SamplingParams(max_tokens=6, temperature=0.0), [5, 9, 20]

    def networks() -> int:
        gc.collect()
        return sum(isinstance(one, LlamaForCausalLM) for one in gc.get_objects())

    async def work() -> dict[str, Any]:
        before = networks()
        bases = {str(tiny_base): ["one"], str(other_base): ["two", "three"]}
        sampler = await open_engines(bases, lambda model: EngineConfig(model=model, policies=2, max_lora_rank=4))
        try:
            assert isinstance(sampler, PolicySampler) and len(sampler._all()) == 2
            assert networks() == before + 1
            answers = {"base": await sampler.sample(prompt, 1, greedy, PolicyRef("two"))}
            for name in ("two", "three"):
                weights = trained.weights(name)
                assert await sampler.publish(PolicyRef(name, 1), weights, LORA) == fingerprint(weights)
                answers[name] = await sampler.sample(prompt, 1, greedy, PolicyRef(name, 1))
            assert networks() == before + 1
            assert set((await sampler.info()).served) == {"two@1", "three@1"}
            return answers
        finally:
            await sampler.aclose()

    answers = asyncio.run(work())
    for name in ("two", "three"):
        row = msgspec.structs.replace(
            ROWS[0],
            prompt_ids=tuple(prompt),
            response_ids=answers[name][0].token_ids,
            logprobs=answers[name][0].logprobs,
        )
        np.testing.assert_allclose(trained.logprobs(name, [row])[0], row.logprobs, atol=1e-4)
    assert answers["base"][0].logprobs != answers["two"][0].logprobs != answers["three"][0].logprobs


def test_targets_that_a_base_lacks_are_named(tiny_base: Path, other_base: Path) -> None:
    odd = LoraSpec(rank=4, targets=("q_proj", "Wqkv"))
    specs = {
        "one": PolicySpec(name="one", lora=LORA),
        "two": PolicySpec(name="two", lora=LORA, model=str(other_base)),
        "three": PolicySpec(name="three", lora=odd, model=str(other_base)),
    }
    with pytest.raises(ConfigError) as caught:
        open_policy_models(str(tiny_base), Policies(specs, {}), FAST, reference=False)
    assert str(caught.value).startswith("lora.targets = 'Wqkv' of policy 'three' are not layers of its base, ")
    assert "Choose from q_proj, k_proj" in str(caught.value)
