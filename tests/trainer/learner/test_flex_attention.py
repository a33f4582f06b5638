"""What a CPU has of FlexAttention over trees: its masks and its forward pass, and torch's own formula for its
gradient, which the kernels of GPUs compute."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import flex_attention

from cotune.algorithms.samples import TrainRow
from cotune.records.policies import policies_for
from cotune.trainer.learner import tree_attention
from cotune.trainer.learner.load import open_policy_models
from cotune.trainer.learner.token_tree import token_tree
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
    return open_policy_models(folder, policies_for("full", ["a"], SMALL), settings, reference=())["a"]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.1)])
def test_log_probabilities_are_those_of_blocks(folder, dtype, tolerance):
    rows = turns()
    found = [policy(folder, how, dtype) for how in ("blocks", "flex")]
    assert [model.logprob_model.shares for model in found] == [True, True]
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


def test_trees_of_every_size_are_padded_to_whole_blocks(monkeypatch):
    """torch's kernels for any length do not compile for some that are no multiple of a block."""
    seen = []

    def kernel(query, key, value, *, block_mask, **more):
        seen.append((query.shape[2], key.shape[2], value.shape[2], *block_mask.seq_lengths))
        return flex_attention.flex_attention(query, key, value, block_mask=block_mask, **more)

    monkeypatch.setattr(tree_attention, "_kernel", lambda device: kernel)
    for tokens in (13, 128, 129):
        tree = token_tree([list(range(tokens))])
        states = torch.randn(1, 2, tokens, 16)
        flex, blocks = (
            kind(tree, torch.device("cpu"))(states, states, states, None)
            for kind in (tree_attention.FlexAttention, tree_attention.BlockedAttention)
        )
        torch.testing.assert_close(flex, blocks, atol=1e-5, rtol=1e-5)
    assert seen == [(128,) * 5, (128,) * 5, (256,) * 5]


@pytest.mark.parametrize("seed", range(3))
def test_the_mask_of_blocks_is_torchs(seed, monkeypatch):
    """Several chunks of blocks of queries, the last one smaller, and rows that share parts of their beginnings."""
    monkeypatch.setattr(tree_attention, "MASK_ROWS", 2)
    generator = torch.Generator().manual_seed(seed)
    trunk = list(range(400))
    ends = torch.randint(1, 400, (5,), generator=generator).tolist()
    tree = token_tree([trunk, *([*trunk[:end], *range(1000 * end, 1000 * end + 70)] for end in ends)])
    found = tree_attention.FlexAttention(tree, torch.device("cpu"))._mask
    length = found.seq_lengths[0]
    expected = flex_attention.create_block_mask(found.mask_mod, None, None, length, length, device="cpu")
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert torch.equal(found.to_dense(), expected.to_dense())
    for block in range(length // 128):
        for kind in ("kv", "full_kv"):
            count = getattr(found, f"{kind}_num_blocks")[0, 0, block]
            numbers = [getattr(mask, f"{kind}_indices")[0, 0, block, :count].tolist() for mask in (found, expected)]
            assert numbers[0] == numbers[1]


class FailsBackward(torch.autograd.Function):
    """A kernel that compiles in the forward pass alone, as on GPUs with little shared memory."""

    @staticmethod
    def forward(ctx, query):
        return query.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("out of resource: shared memory, Required: 114688, Hardware limit: 101376")


def test_a_kernel_that_fails_in_the_backward_pass_is_found_before_the_first_update(folder, monkeypatch, caplog):
    monkeypatch.setattr(
        tree_attention, "_kernel", lambda device: lambda query, key, value, **more: FailsBackward.apply(query)
    )
    config = policy(folder, "blocks").network.config
    problem = tree_attention._trial_problem(config, torch.device("cpu"), torch.float32)
    assert "Hardware limit: 101376" in problem
    monkeypatch.setattr("cotune.trainer.learner.logprob_model.flex_problem", lambda network, dtype: problem)
    model = policy(folder, "flex").logprob_model
    assert (model._flex, model.shares) == (False, True)
    assert "rows attend in blocks instead" in caplog.text


def test_a_kernel_that_computes_other_values_is_not_taken(folder, monkeypatch):
    config = policy(folder, "blocks").network.config
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *states: None)  # refuses gradients on a CPU
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    trial = lambda: tree_attention._trial_problem(config, torch.device("cpu"), torch.float32)  # noqa: E731
    assert trial() == ""
    monkeypatch.setattr(tree_attention, "_kernel", lambda device: lambda query, key, value, **more: 2.0 * query)
    assert trial() != ""
