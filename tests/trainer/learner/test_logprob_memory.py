"""Peak memory of the loss at a real vocabulary, from torch's own record of allocations."""

import pytest
import torch

from cotune.trainer.learner.logprobs import token_logprobs
from tests.trainer.learner.allocations import peak_mb

VOCABULARY, TOKENS, WIDTH = 151_936, 1024, 64


@pytest.fixture(scope="module")
def batch():
    """Hidden states of 1,024 tokens, of which the second half are responses."""
    torch.manual_seed(0)
    states = torch.randn(TOKENS, WIDTH).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH) / 8
    targets = torch.randint(VOCABULARY, (TOKENS // 2,))
    return states, weight, targets


def test_peak_counts_what_is_alive_at_once():
    def two_at_a_time():
        a = torch.empty(1_000_000)
        b = torch.empty(2_000_000)
        del a
        torch.empty(500_000)
        return b

    assert peak_mb(two_at_a_time) == pytest.approx(12.0, abs=0.1)


def test_loss_of_1024_tokens_half_of_them_responses_takes_at_most_250_mb(batch):
    states, weight, targets = batch

    def loss():
        logp, entropy = token_logprobs(states[TOKENS // 2 :], weight, None, targets, torch.ones(TOKENS // 2))
        (-logp.mean() - 0.01 * entropy.mean()).backward()

    peak = peak_mb(loss)
    one_chunk = 64 * VOCABULARY * 4 / 1e6
    assert one_chunk < peak <= 250
    assert states.grad[: TOKENS // 2].abs().max() == 0
    assert states.grad[TOKENS // 2 :].abs().min(dim=1).values.max() > 0
