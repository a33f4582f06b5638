"""The share of each role in the gradient of a policy that several roles share, and losses that balance it."""

import msgspec
import pytest
import torch

from cotune.algorithms.recipes import LossSpec
from cotune.records.policies import policies_for
from cotune.trainer.learner.local import LocalLearner
from cotune.trainer.learner.loss import logit_gradients
from cotune.trainer.learner.update_tokens import UpdateTokens
from tests.trainer.learner.learner_rows import FAST, SMALL, change, make_rows, on_policy, same, snapshot

pytestmark = pytest.mark.slow

EQUAL = LossSpec(balance="equal")


@pytest.fixture
def opened(base):
    def open_learner(loss=None, **settings):
        whole = change(FAST, **{"grad_clip": 0.0, **settings})
        learner = LocalLearner.open(base, policies_for("shared", ("a", "b"), SMALL), whole, loss or LossSpec())
        learner.update("shared", make_rows())  # so that no matrix of the adapter is zero
        return learner

    return open_learner


def mixed_rows(learner, of_a, of_b, scale=1.0):
    """Rows of both roles, the advantages of b times `scale`. Both are (groups, tokens of a response)."""
    rows = []
    for role, seed, (groups, tokens), factor in (("a", 1, of_a, 1.0), ("b", 2, of_b, scale)):
        for row in make_rows(groups=groups, role=role, seed=seed, response=(tokens, tokens)):
            rows.append(msgspec.structs.replace(row, id=role + row.id, advantage=factor * row.advantage))
    return on_policy(learner, "shared", rows)


def without_advantage(rows, role):
    """The rows, those of `role` with an advantage of 0: they stay in the denominators of the loss."""
    return [msgspec.structs.replace(row, advantage=0.0) if row.role == role else row for row in rows]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_a_tokens_gradient_at_the_logits_is_known_up_to_a_factor(temperature):
    torch.manual_seed(0)
    logits = (3.0 * torch.randn(200, 12)).requires_grad_()
    logprobs = (logits / temperature).log_softmax(-1)[:, 0]
    slope = torch.randn(200)
    (slope * logprobs).sum().backward()
    exact = logits.grad.norm(dim=-1)
    estimated = logit_gradients(slope, logprobs.detach(), torch.full((200,), temperature))
    assert (estimated <= exact * 1.0001 + 1e-6).all() and (exact <= 2**0.5 * estimated * 1.0001 + 1e-6).all()


@pytest.mark.parametrize(
    ("of_a", "of_b", "scale"),
    [((6, 4), (6, 4), 1.0), ((8, 8), (2, 2), 1.0), ((2, 2), (8, 4), 1.0), ((6, 3), (3, 3), 4.0)],
)
def test_the_share_of_a_role_is_about_the_share_of_its_own_gradient(opened, of_a, of_b, scale):
    learner = opened()
    rows = mixed_rows(learner, of_a, of_b, scale)
    shown = learner.update("shared", rows, lr_scale=0.0)["a/gradient_share"]
    lengths = {}
    for role, other in ("ab", "ba"):
        lengths[role] = learner.update("shared", without_advantage(rows, other), lr_scale=0.0)["grad_norm"]
    assert shown == pytest.approx(lengths["a"] / (lengths["a"] + lengths["b"]), abs=0.1)


def test_a_token_that_the_clip_holds_has_no_share(opened):
    learner = opened(mini_batch=8)
    rows = mixed_rows(learner, (2, 4), (2, 4))
    behind = [msgspec.structs.replace(row, logprobs=tuple(p - 1.0 for p in row.logprobs)) for row in rows]
    unclipped = learner.update("shared", behind, lr_scale=0.0)
    assert unclipped["clip_share"] == 0.0 and unclipped["a/gradient_share"] > 0.0

    # The first of two optimizer steps is so long that the clip holds some tokens of the second.
    moved = opened(mini_batch=8, lr=0.3).update("shared", rows)
    assert moved["clip_share"] > 0.0
    assert moved["a/gradient_share"] + moved["b/gradient_share"] == pytest.approx(1.0)


def test_rows_of_one_role_have_no_shares(opened):
    learner = opened()
    assert not [name for name in learner.update("shared", make_rows()) if "gradient_share" in name]


def test_without_any_gradient_there_are_no_shares(opened):
    learner = opened()
    rows = without_advantage(without_advantage(mixed_rows(learner, (2, 2), (2, 2)), "a"), "b")
    assert not [name for name in learner.update("shared", rows) if "gradient_share" in name]


@pytest.mark.parametrize("mini_batch", [64, 12])
def test_balanced_roles_have_the_same_share(opened, mini_batch):
    learner = opened(EQUAL, mini_batch=mini_batch)
    metrics = learner.update("shared", mixed_rows(learner, (8, 8), (2, 2)), lr_scale=0.0)
    assert metrics["a/gradient_share"] == pytest.approx(0.5, abs=0.01)


def test_balance_scales_the_rows_of_a_role_and_keeps_the_mean_length(opened):
    learner = opened(EQUAL)
    rows = mixed_rows(learner, (8, 8), (2, 2))
    balanced = learner.update("shared", rows, lr_scale=0.0)
    plain = opened()
    share = plain.update("shared", rows, lr_scale=0.0)["a/gradient_share"]
    factors = {"a": 0.5 / share, "b": 0.5 / (1.0 - share)}
    scaled = [msgspec.structs.replace(row, advantage=row.advantage * factors[row.role]) for row in rows]
    by_hand = plain.update("shared", scaled, lr_scale=0.0)
    assert balanced["grad_norm"] == pytest.approx(by_hand["grad_norm"], rel=1e-4)
    assert balanced["loss"] == pytest.approx(by_hand["loss"], rel=1e-4)


def test_with_one_learning_role_there_is_nothing_to_balance(opened):
    updates = []
    for loss in (LossSpec(), EQUAL):
        learner = opened(loss)
        learner.update("shared", without_advantage(mixed_rows(learner, (3, 4), (3, 4)), "b"))
        updates.append(snapshot(learner, "shared"))
    assert same(*updates)


def test_weights_are_balanced_over_all_mini_batches_of_an_update():
    """A role with few rows in a mini-batch would get a large weight there by chance."""
    rows = []
    for role, count in (("a", 3), ("b", 1)):
        for row in make_rows(groups=1, k=count, role=role, response=(2, 2)):
            rows.append(msgspec.structs.replace(row, logprobs=(-50.0, -50.0), advantage=1.0))
    weights = UpdateTokens(rows, EQUAL).weights([[0, 1], [2, 3]])
    # Each token weighs 1/4 in its mini-batch. Six tokens of a have the length sqrt(6)/4, two of b sqrt(2)/4.
    mean = (6**0.5 + 2**0.5) / 2
    assert weights.tolist() == pytest.approx([0.25 * mean / 6**0.5] * 3 + [0.25 * mean / 2**0.5], rel=1e-5)
