"""The losses against numbers worked out by hand. Ratios are given; log-probabilities are their logarithms."""

import math

import pytest
import torch

from cotune.algorithms.catalogue import recipe
from cotune.algorithms.recipes import LossSpec
from cotune.errors import LearnerError
from cotune.trainer.learner.loss import Tokens, policy_loss, row_weights


def tokens(ratios, advantages, *, lengths=None, behind=None, spec=None, **more):
    """Tokens whose pi_new / pi_sampler are `ratios`; `behind` gives pi_old / pi_sampler, else both agree."""
    lengths = torch.tensor(lengths or [len(ratios)])
    sampler = torch.full((len(ratios),), math.log(0.25))
    new = (sampler + torch.tensor(ratios).log()).requires_grad_()
    old = sampler if behind is None else sampler + torch.tensor(behind).log()
    return Tokens(
        new=new,
        sampler=sampler,
        advantage=torch.tensor(advantages),
        weight=row_weights(spec or LossSpec(), lengths).repeat_interleave(lengths),
        row=torch.arange(len(lengths)).repeat_interleave(lengths),
        old=old,
        **more,
    )


def loss_and_slope(spec, batch):
    parts = policy_loss(spec, batch)
    parts.loss.backward()
    return parts, parts.loss.item(), batch.new.grad.tolist()


def test_ppo_takes_the_lower_of_ratio_and_clipped_ratio():
    # min(1.5, 1.2) = 1.2; min(0.5, 0.8) = 0.5; min(-2, -2) = -2: loss = -(1.2 + 0.5 - 2) / 3 = 0.1
    parts, loss, slope = loss_and_slope(LossSpec(), tokens([1.5, 0.5, 1.0], [1.0, 1.0, -2.0]))
    assert loss == pytest.approx(0.1, abs=1e-6)
    assert slope == pytest.approx([0.0, -0.5 / 3, 2.0 / 3], abs=1e-6)  # d(rA)/d log pi = rA where not clipped
    assert parts.clipped.tolist() == [True, False, False]
    assert parts.ratio.tolist() == pytest.approx([1.5, 0.5, 1.0])


@pytest.mark.parametrize(
    ("ratio", "advantage", "gain", "clipped"),
    [
        (1.30, 1.0, 1.28, True),  # a good token is not pushed further up than 1 + high
        (1.25, 1.0, 1.25, False),
        (0.50, 1.0, 0.50, False),  # a good token below the band may come back
        (0.50, -1.0, -0.80, True),  # a bad token is not pushed further down than 1 - low
        (0.90, -1.0, -0.90, False),
        (1.50, -1.0, -1.50, False),  # a bad token above the band may come back
    ],
)
def test_clip_sides_with_a_higher_upper_bound(ratio, advantage, gain, clipped):
    spec = recipe("dapo").loss
    parts, loss, slope = loss_and_slope(spec, tokens([ratio], [advantage]))
    assert loss == pytest.approx(-gain, abs=1e-6)
    assert slope[0] == pytest.approx(0.0 if clipped else -gain, abs=1e-6)
    assert parts.clipped.item() is clipped


def test_dual_clip_bounds_a_bad_token():
    spec = LossSpec(dual_clip=3.0, tis_cap=None)
    parts, loss, slope = loss_and_slope(spec, tokens([5.0, 2.0], [-1.0, -1.0]))
    assert loss == pytest.approx((3.0 + 2.0) / 2)
    assert slope == pytest.approx([0.0, 1.0])
    assert parts.clipped.tolist() == [True, False]


def test_dual_clip_and_cispos_bound_act_beside_the_correction():
    """By default nothing is cut at tis_cap but the sampler's mismatch: ratios of 5 and 8 meet their own bounds."""
    bad = tokens([5.0, 2.0], [-1.0, -1.0], behind=[1.0, 1.0])
    assert loss_and_slope(LossSpec(dual_clip=3.0), bad)[1:] == (pytest.approx(2.5), pytest.approx([0.0, 1.0]))
    rare = tokens([8.0, 3.0], [1.0, 1.0], behind=[1.0, 1.0])
    assert loss_and_slope(recipe("cispo").loss, rare)[2] == pytest.approx([-2.5, -1.5])


def test_cispo_weighs_the_score_with_a_clipped_constant():
    # low 1, high 4: weights clip(0.5) = 0.5, clip(8) = 5; loss = -(0.5 * 1 * log .125 + 5 * -1 * log 2) / 2
    spec = LossSpec(style="cispo", clip_low=1.0, clip_high=4.0, tis_cap=None)
    parts, loss, slope = loss_and_slope(spec, tokens([0.5, 8.0], [1.0, -1.0]))
    assert loss == pytest.approx(-(0.5 * math.log(0.125) - 5.0 * math.log(2.0)) / 2, abs=1e-6)
    assert slope == pytest.approx([-0.25, 2.5])  # never zero: a clipped token still learns
    assert parts.clipped.tolist() == [False, True]


def test_style_none_is_the_plain_ratio():
    _, loss, slope = loss_and_slope(LossSpec(style="none"), tokens([1.5, 0.5], [1.0, 1.0]))
    assert loss == pytest.approx(-1.0)
    assert slope == pytest.approx([-0.75, -0.25])


def test_without_a_ratio_the_score_is_weighed_by_the_advantage():
    _, loss, slope = loss_and_slope(LossSpec(ratio="none", tis_cap=None), tokens([1.0, 1.0], [1.0, -3.0]))
    assert loss == pytest.approx(math.log(0.25))  # -(1 - 3) / 2 * log(1/4)
    assert slope == pytest.approx([-0.5, 1.5])


def test_without_a_ratio_the_correction_is_truncated_importance():
    parts, _, slope = loss_and_slope(LossSpec(ratio="none"), tokens([0.5, 3.0], [1.0, 1.0]))
    assert slope == pytest.approx([-0.25, -1.0])  # weights 0.5 and min(3, 2)
    assert parts.truncated.tolist() == [False, True]


def test_gspo_has_one_ratio_per_sequence():
    # geometric means: sqrt(1.1 * 1.21) = 1.153690, clipped at 1.1; and 0.9, not clipped as A > 0
    spec = LossSpec(ratio="sequence", clip_low=0.05, clip_high=0.1, aggregation="sequence_mean")
    batch = tokens([1.1, 1.21, 0.9], [1.0, 1.0, 2.0], lengths=[2, 1], spec=spec)
    parts, loss, slope = loss_and_slope(spec, batch)
    assert parts.ratio.tolist() == pytest.approx([1.1536897, 1.1536897, 0.9])
    assert loss == pytest.approx(-(1.1 + 1.8) / 2, abs=1e-6)
    assert slope == pytest.approx([0.0, 0.0, -0.9])


def test_gspo_spreads_the_gradient_evenly_over_the_sequence():
    spec = LossSpec(ratio="sequence", clip_high=9.0, aggregation="sequence_mean", tis_cap=None)
    _, _, slope = loss_and_slope(spec, tokens([1.0, 4.0], [1.0, 1.0], spec=spec))
    assert slope == pytest.approx([-1.0, -1.0])  # s = 2, ds/d log pi_t = s / length


def test_the_ratio_is_corrected_by_a_truncated_weight():
    # pi_old / pi_sampler = 0.5, 1.5, 4: weights 0.5, 1.5, 2. pi_new / pi_old = 1, 1, 1.5 (clipped at 1.2).
    batch = tokens([0.5, 1.5, 6.0], [1.0, -1.0, 1.0], behind=[0.5, 1.5, 4.0])
    parts, loss, slope = loss_and_slope(LossSpec(), batch)
    assert loss == pytest.approx(-(0.5 - 1.5 + 2.4) / 3, abs=1e-6)
    assert slope == pytest.approx([-0.5 / 3, 1.5 / 3, 0.0], abs=1e-6)
    assert parts.ratio.tolist() == pytest.approx([1.0, 1.0, 1.5])
    assert parts.truncated.tolist() == [False, False, True]


def test_no_cap_means_no_correction():
    batch = tokens([4.0], [1.0], behind=[4.0])
    assert policy_loss(LossSpec(tis_cap=None), batch).loss.item() == pytest.approx(-1.0)
    assert policy_loss(LossSpec(tis_cap=None), batch).truncated.tolist() == [False]


def test_kl_is_k3_to_the_reference():
    # pi_ref / pi_new = 2: k3 = 2 - log 2 - 1; its slope in log pi_new is 1 - 2
    batch = tokens([1.0], [0.0], reference=torch.tensor([math.log(0.5)]))
    parts, loss, slope = loss_and_slope(LossSpec(kl=0.1), batch)
    assert loss == pytest.approx(0.1 * (1 - math.log(2)), abs=1e-6)
    assert slope == pytest.approx([-0.1], abs=1e-6)
    assert parts.kl.tolist() == pytest.approx([1 - math.log(2)])


def test_k3_is_bounded_in_slope_where_the_policy_has_left_the_reference():
    """At a gap of 12 nats the slope of exp(q) - q - 1 is 162,754; here it stays that of exp(q) = 10."""
    near, far = math.log(10.0) - 0.1, 12.0
    batch = tokens([1.0, 1.0], [0.0, 0.0], reference=math.log(0.25) + torch.tensor([near, far]))
    parts, loss, slope = loss_and_slope(LossSpec(kl=0.04), batch)
    assert slope == pytest.approx([0.02 * (1 - math.exp(near)), 0.02 * -9.0], rel=1e-5)
    expected = [math.exp(near) - near - 1, 10 * (1 + far - math.log(10.0)) - far - 1]
    assert parts.kl.tolist() == pytest.approx(expected, rel=1e-5)
    assert loss == pytest.approx(0.02 * sum(expected), rel=1e-5)


def test_the_penalty_weighs_a_token_like_the_rest_of_the_loss():
    # pi_old / pi_sampler = 0.5 and 4: weights 0.5 and 2. pi_ref / pi_new = 2: slope 1 - 2
    batch = tokens([0.5, 4.0], [0.0, 0.0], behind=[0.5, 4.0], reference=torch.tensor([0.25, 2.0]).log())
    assert loss_and_slope(LossSpec(kl=0.1), batch)[2] == pytest.approx([-0.025, -0.1], abs=1e-6)


def test_k1_in_the_reward_lowers_the_advantage_by_how_far_the_policy_had_gone():
    # log pi_old - log pi_ref = log 2 and -log 4: A = 1 - 0.5 log 2 and 1 + 0.5 log 4, the ratio being 1.1
    batch = tokens([1.1, 1.1], [1.0, 1.0], behind=[1.0, 1.0], reference=torch.tensor([0.125, 1.0]).log())
    parts, loss, slope = loss_and_slope(LossSpec(kl=0.5, kl_in="reward"), batch)
    gains = [1.1 * (1 - 0.5 * math.log(2)), 1.1 * (1 + 0.5 * math.log(4))]
    assert loss == pytest.approx(-sum(gains) / 2, abs=1e-6)
    assert slope == pytest.approx([-gain / 2 for gain in gains], abs=1e-6)
    assert parts.kl is not None  # reported as k3, in either form


def test_an_episode_of_nine_calls_weighs_as_much_as_one_of_one_call():
    """A one-call success and a nine-call failure of GRPO, advantages 0.707 and -0.707, calls of 3 tokens."""
    lengths = torch.full((10,), 3)
    advantage = torch.tensor([0.7071] + [-0.7071] * 9).repeat_interleave(lengths)
    by_call = row_weights(LossSpec(aggregation="sequence_mean"), lengths).repeat_interleave(lengths)
    by_episode = row_weights(recipe("grpo").loss, lengths, torch.tensor([3] + [27] * 9)).repeat_interleave(lengths)
    assert (by_call * advantage).sum().item() == pytest.approx(-0.5657, abs=1e-4)
    assert (by_episode * advantage).sum().item() == pytest.approx(0.0, abs=1e-6)
    assert by_episode.sum().item() == pytest.approx(1.0)


def test_the_bonus_of_entropy_may_differ_by_row():
    entropy = torch.tensor([0.5, 1.5], requires_grad=True)
    more = {"entropy": entropy, "exploration": torch.tensor([2.0, 0.0])}
    policy_loss(LossSpec(entropy=0.1), tokens([1.0, 1.0], [0.0, 0.0], **more)).loss.backward()
    assert entropy.grad.tolist() == pytest.approx([-0.1, 0.0])


def test_entropy_is_a_bonus():
    entropy = torch.tensor([0.5, 1.5], requires_grad=True)
    parts = policy_loss(LossSpec(entropy=0.1), tokens([1.0, 1.0], [0.0, 0.0], entropy=entropy))
    parts.loss.backward()
    assert parts.loss.item() == pytest.approx(-0.1)
    assert entropy.grad.tolist() == pytest.approx([-0.05, -0.05])


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (LossSpec(aggregation="token_mean"), [0.25, 0.25, 0.25, 0.25]),
        (LossSpec(aggregation="sequence_mean"), [0.5, 1 / 6, 1 / 6, 1 / 6]),
        (LossSpec(aggregation="constant", constant_length=10), [0.05, 0.05, 0.05, 0.05]),
    ],
)
def test_aggregation_of_a_row_of_one_and_a_row_of_three_tokens(spec, expected):
    lengths = torch.tensor([1, 3])
    assert row_weights(spec, lengths).repeat_interleave(lengths).tolist() == pytest.approx(expected)


def test_a_step_raises_the_probability_of_the_better_answer():
    logits = torch.zeros(2, requires_grad=True)
    logp = logits.log_softmax(-1)
    batch = Tokens(
        new=logp,
        sampler=logp.detach(),
        old=logp.detach(),
        advantage=torch.tensor([1.0, -1.0]),
        weight=torch.tensor([0.5, 0.5]),
        row=torch.tensor([0, 1]),
    )
    policy_loss(recipe("at_grpo").loss, batch).loss.backward()
    better = (logits - logits.grad).softmax(-1)[0].item()
    assert better == pytest.approx(1 / (1 + math.exp(-1.0)))  # the gradient of each logit is -/+ 0.5


def test_a_loss_of_ones_own_stands_in_the_place_of_ratio_and_clip(tmp_path):
    """Tokens weigh min(pi_old / pi_sampler, cap) and their share as ever; here pi_old / pi_sampler is 1.5 and 4."""
    path = tmp_path / "method_of_tokens.py"
    path.write_text("def squared(tokens):\n    return tokens.advantage * (tokens.new - tokens.old) ** 2\n")
    spec = LossSpec(token_loss=f"{path}:squared")
    batch = tokens([3.0, 4.0 * math.e], [1.0, -1.0], behind=[1.5, 4.0])
    parts, loss, slope = loss_and_slope(spec, batch)
    assert loss == pytest.approx((1.5 * math.log(2) ** 2 - 2.0) / 2, abs=1e-6)
    assert slope == pytest.approx([1.5 * 2 * math.log(2) / 2, -2.0 * 2 / 2], abs=1e-5)
    assert parts.clipped.tolist() == [False, False] and parts.truncated.tolist() == [False, True]


@pytest.mark.parametrize("body", ["return tokens.new.sum()", "return tokens.advantage", "return tokens.nothing"])
def test_what_is_no_loss_of_each_token_is_refused(tmp_path, body):
    path = tmp_path / f"method_{abs(hash(body))}.py"
    path.write_text(f"def bad(tokens):\n    {body}\n")
    with pytest.raises(LearnerError, match=r"bad (returned no loss for each of 1 tokens|raised AttributeError)"):
        policy_loss(LossSpec(token_loss=f"{path}:bad"), tokens([1.0], [1.0], behind=[1.0]))
