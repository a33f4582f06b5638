"""The samplers on pretrained weights, with two adapters at once, against plain transformers and PEFT."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer

from cotune.integrations.models.transformers.sampler import TransformersSampler
from cotune.records.policies import ALL_LINEAR, LoraSpec
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import Completion, Sampler, SamplingParams, Weights
from tests.integrations.conftest import vllm_actor

LORA = LoraSpec(rank=8, alpha=16.0)
ROLES = ("planner", "checker")
TOKENS = 8


class Reference:
    """The model with two random adapters in PEFT; None names the model without one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tokenizer = AutoTokenizer.from_pretrained(folder)
        asked = ("What is the capital of France?", "Say yes or no: is 7 + 5 = 12?")
        self.prompts = [
            tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"]
            for text in asked
        ]
        self.decode = tokenizer.decode
        torch.manual_seed(0)
        settings = {"r": LORA.rank, "lora_alpha": LORA.alpha, "target_modules": list(ALL_LINEAR)}
        config = LoraConfig(**settings)
        self.model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config, adapter_name=ROLES[0])
        self.model.add_adapter(ROLES[1], config)
        for name, parameter in self.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
        self.model.eval()

    def weights(self, role: str) -> Weights:
        found = get_peft_model_state_dict(self.model, adapter_name=role)
        return {name: tensor.detach().numpy().copy() for name, tensor in found.items()}

    def logprobs(self, role: str | None, ids: list[int]) -> torch.Tensor:
        """Log-probabilities of every next token."""
        self.model.set_adapter(role or ROLES[0])
        with torch.no_grad():
            if role:
                return self.model(torch.tensor([ids])).logits[0].log_softmax(-1)
            with self.model.disable_adapter():
                return self.model(torch.tensor([ids])).logits[0].log_softmax(-1)


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Reference:
    return Reference(smollm2)


@pytest.fixture(
    scope="module", params=["thread", pytest.param("vllm-ray", marks=[pytest.mark.timeout(900), pytest.mark.long])]
)
def sampler(request: pytest.FixtureRequest, reference: Reference) -> Iterator[Sampler]:
    if request.param == "thread":
        opened = run(TransformersSampler.open(reference.folder, host="thread"))
        closing: Iterator[Sampler] = iter(())
    else:
        request.getfixturevalue("ray_runtime")
        closing = vllm_actor(reference.folder, policies=2, max_lora_rank=LORA.rank)
        opened = next(closing)
    for role in ROLES:
        run(opened.publish(PolicyRef(role, 1), reference.weights(role), LORA))
    yield opened
    if request.param == "thread":
        run(opened.aclose())
    next(closing, None)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


async def ask(
    sampler: Sampler, reference: Reference, temperature: float, n: int
) -> dict[str | None, list[list[Completion]]]:
    """Completions of all prompts by role, all at once."""
    how = SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=3)
    players = {None: PolicyRef("anyone"), **{role: PolicyRef(role, 1) for role in ROLES}}

    async def of(policy: PolicyRef) -> list[list[Completion]]:
        return list(await asyncio.gather(*(sampler.sample(p, n, how, policy) for p in reference.prompts)))

    return dict(zip(players, await asyncio.gather(*map(of, players.values())), strict=True))


@pytest.mark.long  # `test_contract.py` compares distributions on a small model, the test below the likeliest tokens
def test_each_policy_samples_from_its_own_distribution(sampler: Sampler, reference: Reference) -> None:
    for role, answers in run(ask(sampler, reference, 1.0, 2)).items():
        for prompt, completions in zip(reference.prompts, answers, strict=True):
            for completion in completions:
                ids = list(completion.token_ids)
                scores = reference.logprobs(role, [*prompt, *ids])[len(prompt) - 1 : -1]
                expected = scores.gather(-1, torch.tensor(ids)[:, None])[:, 0].numpy()
                np.testing.assert_allclose(completion.logprobs, expected, atol=1e-3)


def test_greedy_takes_the_likeliest_tokens_and_the_model_knows_paris(sampler: Sampler, reference: Reference) -> None:
    answers = run(ask(sampler, reference, 0.0, 1))
    assert reference.decode(answers[None][0][0].token_ids).startswith("The capital of France is Paris")
    assert len({tuple(completion.token_ids for (completion,) in found) for found in answers.values()}) == 3
    for role, found in answers.items():
        for prompt, (completion,) in zip(reference.prompts, found, strict=True):
            ids = list(completion.token_ids)
            scores = reference.logprobs(role, [*prompt, *ids])[len(prompt) - 1 : -1]
            assert ids == scores.argmax(-1).tolist()
