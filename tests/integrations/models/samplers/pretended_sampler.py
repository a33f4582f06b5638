"""Run by `test_pretended_gpu`: the in-process engine on a pretended GPU draws what it draws on the CPU."""

from __future__ import annotations

import copy
import sys
import tempfile
from typing import Any

from tests.pretend_gpu import pretend, waits  # isort: skip - before what it changes is imported

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from cotune.integrations.models.child.wire import Answer, Command
from cotune.integrations.models.transformers.engine import load
from cotune.integrations.models.transformers.rows import Job
from cotune.integrations.models.transformers.wire import ModelSource
from cotune.records.policies import LoraSpec
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import Completion, SamplingParams, Weights
from tests.trainer.learner.learner_rows import build_learner_base

BASE, ADAPTER, FULL = PolicyRef("any"), PolicyRef("a", 1), PolicyRef("f", 1)
WIDTHS = {"q_proj": 64, "v_proj": 32}


def adapter() -> Weights:
    rng, found = np.random.default_rng(0), {}
    for name, width in WIDTHS.items():
        stem = f"base_model.model.model.layers.0.self_attn.{name}"
        found[f"{stem}.lora_A.weight"] = rng.normal(size=(4, 64)).astype(np.float32)
        found[f"{stem}.lora_B.weight"] = rng.normal(size=(width, 4)).astype(np.float32)
    return found


def drawn(model: Any, full: Weights) -> list[list[Completion]]:
    """What is drawn from the base, an adapter and full weights, with all that can change a distribution, and again from
    a prompt that goes on where an earlier one ended."""
    answers: dict[int, Answer] = {}

    def emit(found: list[Answer]) -> None:
        answers.update({answer.id: answer for answer in found})
        if len(answers) == len(commands):
            engine.submit(Command("close"))
        elif len(answers) == len(commands) - 1:  # goes on from keys and values that are kept by now
            engine.submit(Command("sample", len(commands), commands[-1]))

    few = {"max_tokens": 9, "seed": 2}
    commands: list[tuple[Any, ...]] = [
        (ADAPTER, adapter(), LoraSpec(rank=4, alpha=8.0)),
        (FULL, full, None),
        (tuple(range(5, 12)), 3, SamplingParams(max_tokens=20, seed=1), BASE),
        (tuple(range(5, 20)), 4, SamplingParams(**few, top_k=5, top_p=0.9, min_p=0.01), ADAPTER),
        (tuple(range(5, 20)), 2, SamplingParams(max_tokens=30, temperature=0.0), ADAPTER),
        (tuple(range(9, 40)), 2, SamplingParams(**few, logit_bias=((4, 2.0),), repetition_penalty=1.2), BASE),
        (tuple(range(9, 40)), 2, SamplingParams(**few, frequency_penalty=0.3, presence_penalty=0.1), BASE),
        (tuple(range(5, 12)), 2, SamplingParams(**few), FULL),
        (tuple(range(5, 30)), 2, SamplingParams(**few), BASE),
    ]
    source = ModelSource(model, None, None, 1, 1024, 1 << 22, None, (3,), 1 << 24)
    engine = load(source, emit)
    for id, arguments in enumerate(commands[:-1], 1):
        engine.submit(Command("publish" if id < 3 else "sample", id, arguments))
    engine.run()
    assert engine.prefixes.reused > 0
    return [answers[id].value for id in range(3, len(commands) + 1)]


def waits_of_steps(model: Any, steps: int) -> list[str]:
    """Where the host waits for the GPU in so many decode steps of six rows with two adapters and the base."""
    engine = load(ModelSource(model, None, None, 1, 1024, 1 << 22, None, (), 0), lambda answers: None)
    batch = engine._base
    kinds = [engine._place_weights(PolicyRef("a", version), adapter(), LoraSpec(rank=4))[1] for version in (1, 2)]
    how = SamplingParams(max_tokens=40)
    batch.admit([Job(i, (5, 6, 7 + i), 2, how, kind, 40, i) for i, kind in enumerate([-1, *kinds])])
    batch.step()  # the random numbers of these steps go to the device with the first
    waits.clear()
    for _ in range(steps):
        batch.step()
    assert batch.rows == 6
    return list(waits)


def main() -> None:
    torch.set_num_threads(1)
    network = AutoModelForCausalLM.from_pretrained(build_learner_base(tempfile.mkdtemp(), layers=1)).eval()
    full = {name: 0.9 * parameter.detach().numpy() for name, parameter in network.named_parameters()}
    expected = drawn(copy.deepcopy(network), full)
    pretend()
    found = drawn(copy.deepcopy(network).to("cuda"), full)
    for these, those in zip(found, expected, strict=True):
        for one, other in zip(these, those, strict=True):
            assert one.token_ids == other.token_ids
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
    half = copy.deepcopy(network).to("cuda", torch.bfloat16)
    drawn(half, full)
    assert half(torch.tensor([[5, 6, 7]], device="cuda")).logits.dtype == torch.float32
    waited = waits_of_steps(copy.deepcopy(network).to("cuda", torch.bfloat16), 10)
    assert len(waited) == 10, waited
    sys.stdout.write("the same\n")


if __name__ == "__main__":
    main()
