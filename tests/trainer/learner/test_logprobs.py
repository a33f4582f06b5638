"""Chunked log-probabilities equal the naive ones, forward and backward."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from cotune.integrations.models.float32 import widened_product
from cotune.trainer.learner import logprobs
from cotune.trainer.learner.logprobs import token_logprobs


def naive(hidden, weight, bias, targets, temperature):
    logits = torch.nn.functional.linear(hidden, weight, bias) / temperature[:, None]
    logp = logits.log_softmax(-1)
    return logp.gather(1, targets[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


def inputs(tokens, vocabulary, width, seed, bias=True):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=generator).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=generator).requires_grad_()
    offset = torch.randn(vocabulary, generator=generator).requires_grad_() if bias else None
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    temperature = torch.rand(tokens, generator=generator) + 0.5
    return hidden, weight, offset, targets, temperature


def gradients(function, arguments, share, bonus):
    for tensor in arguments[:3]:
        if tensor is not None:
            tensor.grad = None
    logp, entropy = function(*arguments)
    ((share * logp).sum() + bonus * entropy.sum()).backward()
    return logp.detach(), entropy.detach(), [t.grad for t in arguments[:3] if t is not None and t.requires_grad]


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(1, 17),
    vocabulary=st.integers(2, 40),
    rows=st.integers(1, 20),
    bias=st.booleans(),
    frozen=st.booleans(),
    bonus=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 1000),
)
def test_fused_equals_naive_whatever_the_chunks(tokens, vocabulary, rows, bias, frozen, bonus, seed):
    arguments = inputs(tokens, vocabulary, 5, seed, bias)
    if frozen:
        arguments = (arguments[0], *(t if t is None else t.detach() for t in arguments[1:]))
    share = torch.linspace(-1.0, 1.0, tokens)
    before = logprobs.CHUNK_BYTES, logprobs.CHUNK_ROWS
    logprobs.CHUNK_BYTES, logprobs.CHUNK_ROWS = 0, {"cpu": rows}
    try:
        fused = gradients(token_logprobs, arguments, share, bonus)
    finally:
        logprobs.CHUNK_BYTES, logprobs.CHUNK_ROWS = before
    expected = gradients(naive, arguments, share, bonus)
    for mine, theirs in zip([*fused[:2], *fused[2]], [*expected[:2], *expected[2]], strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-4)


def test_literal_values():
    # logits 0, log 2, log 5 at temperature 1: p = 1/8, 2/8, 5/8
    weight = torch.tensor([[1.0], [2.0], [5.0]]).log()
    logp, entropy = token_logprobs(torch.ones(1, 1), weight, None, torch.tensor([2]), torch.ones(1))
    assert logp.exp().item() == pytest.approx(0.625)
    assert entropy.item() == pytest.approx(0.900256)


def test_temperature_divides_the_logits():
    # logits 0, log 4 at temperature 2: p = 1/3, 2/3
    weight = torch.tensor([[1.0], [4.0]]).log()
    logp, _ = token_logprobs(torch.ones(1, 1), weight, None, torch.tensor([1]), torch.tensor([2.0]))
    assert logp.exp().item() == pytest.approx(2 / 3)


def test_a_frozen_head_gets_no_gradient():
    hidden, weight, _, targets, temperature = inputs(6, 9, 4, 0)
    weight = weight.detach()
    token_logprobs(hidden, weight, None, targets, temperature)[0].sum().backward()
    assert weight.grad is None
    assert hidden.grad.abs().sum() > 0


@pytest.mark.parametrize("bonus", [0.0, 0.3])
def test_masks_and_biases_equal_the_naive_way(bonus):
    """Token 2 may be any of the even ones, token 3 one alone, token 4 has 3 added to logit 1, token 5 both."""
    arguments = inputs(6, 40, 5, 7)
    arguments[3][2:] = torch.tensor([4, 7, 1, 6])
    even, alone = torch.zeros(2, 64, dtype=torch.bool)
    even[0:40:2] = alone[7] = True
    bits = torch.stack([even, alone]).view(2, 2, 32).long().mul(1 << torch.arange(32)).sum(-1).to(torch.int32)
    added = torch.zeros(1, 40)
    added[0, [1, 6]] = 3.0
    shaping = logprobs.LogitShaping(
        bits, torch.tensor([-1, -1, 0, 1, -1, 0]), added, torch.tensor([-1, -1, -1, -1, 0, 0])
    )
    shift = torch.zeros(6, 40)
    shift[4:] += added[0]
    shift[[2, 5]] = shift[[2, 5]].masked_fill(~even[:40], -1e9)
    shift[3] = shift[3].masked_fill(~alone[:40], -1e9)

    def shaped(hidden, weight, bias, targets, temperature):
        logits = (torch.nn.functional.linear(hidden, weight, bias) + shift) / temperature[:, None]
        logp = logits.log_softmax(-1)
        return logp.gather(1, targets[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)

    share = torch.linspace(-1.0, 1.0, 6)
    fused = gradients(lambda *given: token_logprobs(*given, shaping), arguments, share, bonus)
    expected = gradients(shaped, arguments, share, bonus)
    assert fused[0][3] == 0.0 == fused[1][3]
    for mine, theirs in zip([*fused[:2], *fused[2]], [*expected[:2], *expected[2]], strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-6, rtol=1e-5)


def test_logits_of_bfloat16_states_are_not_rounded():
    """In bfloat16 a logit of about 20 is rounded to a multiple of 1/8: that is far from what its operands say."""
    generator = torch.Generator().manual_seed(3)
    hidden = (4.0 * torch.randn(64, 48, generator=generator)).bfloat16()
    weight = torch.randn(200, 48, generator=generator).bfloat16()
    targets = torch.randint(200, (64,), generator=generator)
    found, _ = token_logprobs(hidden, weight, None, targets, torch.ones(64))
    expected, _ = naive(hidden.double(), weight.double(), None, targets, torch.ones(64))
    rounded, _ = naive(hidden, weight, None, targets, torch.ones(64))
    assert (found - expected).abs().max() < 1e-4
    assert (rounded - expected).abs().max() > 1e-2


def test_a_gpu_multiplies_bfloat16_into_float32():
    """On fake tensors of a GPU: the states and the embedding stay in bfloat16, and no copy in float32 is made."""
    with FakeTensorMode():
        hidden = torch.empty(4, 8, dtype=torch.bfloat16, device="cuda")
        weight = torch.empty(16, 8, dtype=torch.bfloat16, device="cuda")
        with OperatorNames() as names:
            logits = widened_product(hidden, weight)
    assert (logits.dtype, logits.shape, logits.device.type) == (torch.float32, (4, 16), "cuda")
    assert [name for name in names.seen if name.startswith("aten")] == ["aten.t.default", "aten.mm.dtype"]


class OperatorNames(TorchDispatchMode):
    """Notes the operators that run."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("bonus", [0.0, 0.3])
def test_logits_beyond_the_token_ids_take_no_part(bonus):
    """Of 40 logits the first 33 are of token ids; the others get no gradient."""
    arguments = inputs(6, 40, 5, 7)
    arguments[3][:] = torch.tensor([4, 7, 1, 6, 32, 0])

    def cut(hidden, weight, bias, targets, temperature):
        logits = torch.nn.functional.linear(hidden, weight, bias)[:, :33] / temperature[:, None]
        logp = logits.log_softmax(-1)
        return logp.gather(1, targets[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)

    share = torch.linspace(-1.0, 1.0, 6)
    fused = gradients(lambda *given: token_logprobs(*given, token_ids=33), arguments, share, bonus)
    expected = gradients(cut, arguments, share, bonus)
    for mine, theirs in zip([*fused[:2], *fused[2]], [*expected[:2], *expected[2]], strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-6, rtol=1e-5)
