"""What a CPU has of FlexAttention over trees: its masks and its forward pass, and torch's own formula for its
gradient, which the kernels of GPUs compute."""

from __future__ import annotations

import logging
import re
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn.attention import flex_attention
from transformers import DeepseekV3Config

from cotune.algorithms.recipes import LossSpec
from cotune.algorithms.samples import TrainRow
from cotune.records.policies import policies_for
from cotune.trainer.learner import attention_trial, logprob_model, tree_attention
from cotune.trainer.learner.attention_trial import AttentionShape, Verdict, prefers_flex
from cotune.trainer.learner.dist import SingleProcess
from cotune.trainer.learner.load import open_policy_models
from cotune.trainer.learner.local import LocalLearner
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


SHAPE = attention_trial.AttentionShape(heads=2, groups=1, width=16)
CPU = torch.device("cpu")


@pytest.fixture
def trial(monkeypatch, caplog):
    """The trial of a GPU, on the CPU and with small trees. FlexAttention computes by torch's formula."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *states: None)  # refuses gradients on a CPU
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(attention_trial, "SCALE", 16)
    caplog.set_level(logging.INFO)
    return lambda dtype=torch.float32: attention_trial.try_flex(SHAPE, CPU, dtype, autocast=False)[0].flex


def with_kernel(monkeypatch, kernel):
    monkeypatch.setattr(tree_attention, "_kernel", lambda device: kernel)


def with_seconds(monkeypatch, *seconds):
    """Let the trial measure these for FlexAttention and for blocks."""
    measured = iter(seconds)
    monkeypatch.setattr(attention_trial, "fastest_seconds", lambda work, device: next(measured))


@pytest.mark.parametrize(
    ("flex_seconds", "blocks_seconds", "chosen"), [(0.5, 1.0, True), (0.95, 1.0, False), (2.0, 1.0, False)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_clearly_faster_attention_is_taken(trial, monkeypatch, caplog, dtype, flex_seconds, blocks_seconds, chosen):
    with_seconds(monkeypatch, flex_seconds, blocks_seconds)
    assert trial(dtype) is chosen
    [line] = caplog.messages
    assert line.startswith(f"Rows attend by {'FlexAttention' if chosen else 'SDPA'}: ")
    assert f"over 512 tokens takes {1e3 * flex_seconds:.2f} ms by FlexAttention" in line


def test_the_trial_times_forward_and_backward(trial, caplog):
    trial()
    [line] = caplog.messages
    flex, blocks = (float(text) for text in re.findall(r"([0-9.]+) ms", line))
    assert flex > 0
    assert blocks > 0


def out_of_memory(query, key, value, **more):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore about it.")


def without_triton(query, key, value, **more):
    raise BackendCompilerFailed(lambda: None, RuntimeError("Cannot find a working triton installation.\nSee ..."), None)


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (lambda query, key, value, **more: FailsBackward.apply(query), "Hardware limit: 101376"),
        (out_of_memory, "CUDA out of memory"),
        (without_triton, "Cannot find a working triton installation"),
        (lambda query, key, value, **more: query + 0.0 * (key.sum() + value.sum()), "it computes other values"),
    ],
)
def test_a_trial_that_fails_leaves_blocks_and_says_why_in_one_line(trial, monkeypatch, caplog, kernel, reason):
    with_kernel(monkeypatch, kernel)
    assert trial() is False
    [line] = caplog.messages
    assert line.startswith("Rows attend by SDPA, because FlexAttention does not work here (")
    assert reason in line
    assert "\n" not in line
    assert caplog.records[0].levelname == "WARNING"


@pytest.fixture
def trials(monkeypatch, tmp_path):
    """The trials that are made, on a pretended GPU with an empty state folder. All prefer FlexAttention."""
    made = []

    def try_flex(shape, device, dtype, *, autocast):
        made.append((shape, dtype, autocast))
        return Verdict(flex=True, line="Rows attend by FlexAttention: ..."), made[-1][1] != torch.float16

    monkeypatch.setattr(attention_trial, "try_flex", try_flex)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    attention_trial.tried_once.cache_clear()
    yield made
    attention_trial.tried_once.cache_clear()


def in_a_new_process(*arguments, dtype=torch.bfloat16, autocast=False):
    attention_trial.tried_once.cache_clear()
    return attention_trial.tried_once(*(arguments or (SHAPE, CPU)), dtype, autocast=autocast).flex


def test_later_runs_attend_by_the_verdict_of_the_first(trials, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    assert [in_a_new_process() for _ in range(3)] == [True] * 3
    assert len(trials) == 1
    assert caplog.messages[-1] == "Rows attend by FlexAttention: ... (tried earlier)"

    in_a_new_process(AttentionShape(4, 1, 16), CPU)
    in_a_new_process(dtype=torch.float32)
    in_a_new_process(autocast=True)
    monkeypatch.setattr(attention_trial, "version", lambda package: "9.9")
    in_a_new_process()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A10")
    in_a_new_process()
    assert len(trials) == 6


def test_a_verdict_that_does_not_last_is_not_kept(trials):
    for _ in range(2):
        in_a_new_process(dtype=torch.float16)
    assert len(trials) == 2


def test_the_verdict_of_a_trial_lasts_unless_it_failed(trial, monkeypatch):
    assert attention_trial.try_flex(SHAPE, CPU, torch.float32, autocast=False)[1] is True
    for fails in (out_of_memory, without_triton):
        with_kernel(monkeypatch, fails)
        assert attention_trial.try_flex(SHAPE, CPU, torch.float32, autocast=False)[1] is False


class OneRank:
    """A rank of two. Rank 0 prefers FlexAttention."""

    size = 2

    def __init__(self, rank):
        self.rank = rank

    def max(self, values):
        assert values.tolist() == [int(self.rank == 0)]
        return values.clamp(min=1)


class GpuNetwork:
    """A network whose weights are on a GPU."""

    def __init__(self, **config):
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(**config))

    def get_input_embeddings(self):
        return SimpleNamespace(weight=SimpleNamespace(device=PretendedDevice()))


class PretendedDevice:
    type = "cuda"


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_attend_as_rank_0_decides(trials, monkeypatch, rank):
    make = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda values, device: make(values))
    network = GpuNetwork(num_attention_heads=2, head_dim=16)
    assert prefers_flex(network, torch.bfloat16, autocast=False, group=OneRank(rank)) is True
    assert len(trials) == (1 if rank == 0 else 0)


def test_latent_attention_is_not_tried(trials):
    """Queries of DeepSeek-V3 have 192 numbers, values 128."""
    shape = attention_trial.attention_shape
    assert shape(SimpleNamespace(num_attention_heads=8, hidden_size=64)) == AttentionShape(8, 8, 8)
    assert shape(SimpleNamespace(num_attention_heads=8, num_key_value_heads=2, head_dim=16)) == AttentionShape(8, 2, 16)
    assert shape(DeepseekV3Config()) is None
    assert shape(SimpleNamespace(num_attention_heads=8, head_dim=16, v_head_dim=8)) is None
    network = GpuNetwork(num_attention_heads=8, head_dim=16, v_head_dim=8)
    assert prefers_flex(network, torch.bfloat16, autocast=False, group=SingleProcess()) is False
    assert trials == []


def test_no_trial_is_made_on_a_cpu(folder, monkeypatch):
    monkeypatch.setattr(attention_trial, "try_flex", lambda *shape, **more: pytest.fail("a trial on the CPU"))
    learner = LocalLearner.open(folder, policies_for("full", ["a"], SMALL), FAST, LossSpec(kl=0.1))
    model = learner._policies["a"]
    assert (model.logprob_model._flex, model.logprob_model.shares) == (False, True)


@pytest.mark.parametrize("chosen", [True, False])
def test_a_learner_trains_by_the_attention_that_the_trial_chose(folder, monkeypatch, chosen):
    """The frozen copy, to which the KL divergence is measured, attends in the same way."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *states: None)  # refuses gradients on a CPU
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(logprob_model, "prefers_flex", lambda network, dtype, *, autocast, group: chosen)
    loss = LossSpec(kl=0.1)
    learner, blocks = (
        LocalLearner.open(folder, policies_for("full", ["a"], SMALL), change(FAST, tree_attention=how), loss)
        for how in ("auto", "blocks")
    )
    model = learner._policies["a"]
    assert (model.logprob_model._flex, model.frozen_copy._flex) == (chosen, chosen)
    found, expected = (one.update("a", turns()) for one in (learner, blocks))
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
