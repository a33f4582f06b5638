"""What a learner of adapters keeps of the weights that it does not train."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import pytest
import torch

from cotune.algorithms.recipes import LossSpec
from cotune.integrations.models.transformers.engine import load
from cotune.integrations.models.transformers.wire import ModelSource
from cotune.records.policies import policies_for
from cotune.trainer.learner.local import LocalLearner
from tests.trainer.learner.learner_rows import FAST, SMALL, change, make_rows


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_frozen_weights_are_there_once_in_their_own_precision_and_without_gradients(
    base: str, dtype: Literal["float32", "bfloat16"]
) -> None:
    learner = LocalLearner.open(base, policies_for("lora", ["a", "b"], SMALL), change(FAST, dtype=dtype), LossSpec())
    for policy in ("a", "b"):
        learner.update(policy, make_rows())
    one, other = (learner._policies[name] for name in ("a", "b"))
    assert one.network is other.network
    frozen = {name: p for name, p in one.network.named_parameters() if "lora_" not in name}
    assert len(frozen) > 10
    layers = {p.dtype for name, p in frozen.items() if "base_layer" in name}
    others = {p.dtype for name, p in frozen.items() if "base_layer" not in name}
    assert layers == {getattr(torch, dtype)} and others <= {torch.float32, getattr(torch, dtype)}
    assert all(p.grad is None and not p.requires_grad for p in frozen.values())
    held = {id(p) for optimizer in learner._optimizers.values() for p in optimizer.state}
    assert held == {id(p) for model in (one, other) for p in model.parameters().values()}
    assert not held & {id(p) for p in frozen.values()}


def mapped(network: torch.nn.Module, folder: str) -> float:
    """Share of the bytes of a network's frozen weights that lie in pages of the model's file."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if folder in line]
    spans = [tuple(int(end, 16) for end in line[0].split("-")) for line in lines]
    frozen = [p for name, p in network.named_parameters() if "lora_" not in name]
    inside = sum(p.nbytes for p in frozen if any(low <= p.data_ptr() < high for low, high in spans))
    return inside / sum(p.nbytes for p in frozen)


@pytest.mark.skipif(sys.platform != "linux", reason="mappings are read from /proc")
def test_the_learner_and_the_sampler_have_one_copy_of_the_base_on_a_machine(base: str) -> None:
    learner = LocalLearner.open(base, policies_for("lora", ["a"], SMALL), FAST, LossSpec())
    learner.update("a", make_rows())
    assert mapped(learner._policies["a"].network, base) == 1.0
    source = ModelSource(base, "cpu", None, 1, 16, 1 << 16, None, (0,))
    assert mapped(load(source, lambda _: None)._base.model, base) == 1.0
