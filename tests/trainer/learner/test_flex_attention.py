"""What a CPU has of `learner.tree_attention = "flex"`: its masks and its forward pass, and torch's own formula for its
gradient, which the kernels of GPUs compute."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import flex_attention

from cotune.algorithms.samples import TrainRow
from cotune.policies import policies_for
from cotune.trainer.learner.load import open_policy_models
from tests.trainer.learner.learner_rows import FAST, SMALL, build_learner_base, change, make_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_learner_base(tmp_path_factory.mktemp("flex") / "base")


def turns() -> list[TrainRow]:
    """Prompts with several answers each, and later turns of two of these, which hold the earlier ones."""
    first = make_rows(groups=3, k=3, seed=1, response=(2, 8))
    later = [
        change(row, id=f"later {row.id}", prompt_ids=(*before.prompt_ids, *before.response_ids, 5, 7, *end))
        for before in first[:2]
        for row, end in zip(make_rows(groups=1, k=3, seed=2, response=(2, 8)), [(), (), (9,)], strict=True)
    ]
    return first + later


def policy(folder, how, dtype="float32"):
    settings = change(FAST, tree_attention=how, dtype=dtype)
    return open_policy_models(folder, policies_for("full", ["a"], SMALL), settings, reference=False)["a"]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.1)])
def test_log_probabilities_are_those_of_blocks(folder, dtype, tolerance):
    rows = turns()
    found = [policy(folder, how, dtype) for how in ("blocks", "flex")]
    assert [model.shares_prompts for model in found] == [True, True]
    blocks, flex = (model.logprobs(rows) for model in found)
    torch.testing.assert_close(flex, blocks, atol=tolerance, rtol=tolerance)


def test_gradients_are_those_of_blocks_by_the_formula_that_stands_for_the_kernel(folder, monkeypatch):
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *states: None)  # refuses gradients on a CPU
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    gradients = []
    for how in ("blocks", "flex"):
        model = policy(folder, how)
        logprobs, entropy = model.token_logprobs(turns())
        (logprobs.sum() - 0.1 * entropy.sum()).backward()
        gradients.append({name: p.grad for name, p in model.parameters().items()})
    blocks, flex = gradients
    assert blocks.keys() == flex.keys()
    for name, gradient in blocks.items():
        torch.testing.assert_close(flex[name], gradient, atol=1e-5 * gradient.abs().max().item(), rtol=1e-5)
