"""The policy losses as pure functions of per-token tensors, configured by a recipe's `LossSpec`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from cotune.algorithms.own import own_function
from cotune.algorithms.recipes import LossSpec
from cotune.errors import LearnerError, error_text
from cotune.runtime.user_code import error_origin


@dataclass(frozen=True)
class Tokens:
    """The response tokens of one pass that count, flattened over rows; every tensor has shape [N].

    `new`, `sampler` and `old` are log-probabilities in nats: of the weights being trained (with gradient), of the
    sampler, and of the policy before the update. `row` is the number of each token's row, from 0. `weight` is the
    token's share of the loss (`row_weights`). Only their loss terms need `entropy` (with gradient) and `reference`, the
    log-probabilities of a reference policy. `exploration`, if given, multiplies the weight of the entropy. `rows` is
    the number of rows; a pass gives it, because reading it from `row` would wait for the GPU.
    """

    new: Tensor
    sampler: Tensor
    old: Tensor
    advantage: Tensor
    weight: Tensor
    row: Tensor
    entropy: Tensor | None = None
    exploration: Tensor | None = None
    reference: Tensor | None = None
    rows: int | None = None

    def detached(self) -> Tokens:
        """Return the tokens without their autograd graph, which holds the memory of the pass."""
        entropy = None if self.entropy is None else self.entropy.detach()
        return replace(self, new=self.new.detach(), entropy=entropy)


class LossParts(NamedTuple):
    """The loss (a scalar), and figures of each token, [N], all detached from the graph except `loss`."""

    loss: Tensor
    ratio: Tensor
    """The policy ratio."""
    clipped: Tensor
    """Whether the clip of the loss stops the token's gradient."""
    truncated: Tensor
    """Whether `tis_cap` has truncated the token's off-policy correction."""
    kl: Tensor | None
    """k3, an estimate of KL(policy || reference). None without a reference."""


KL_SLOPE = 10.0
"""k3 is continued along its tangent where reference / policy is above this quotient, so its slope stays below it."""


def row_weights(spec: LossSpec, lengths: Tensor, trajectories: Tensor | None = None) -> Tensor:
    """Return the weight of each token of a row in the loss of a mini-batch, [R]. The rows have `lengths` [R] tokens
    that count.

    - token_mean: 1 / tokens of the mini-batch
    - sequence_mean: 1 / (rows * tokens of the row)
    - trajectory_mean: 1 / (trajectories * tokens of the trajectory). `trajectories` [R] has the tokens of each row's
      whole trajectory. If only a part of a trajectory is in the mini-batch, it counts as that share of a trajectory.
    - constant: 1 / (rows * constant_length), Dr. GRPO's sum without length bias

    The loss of a mini-batch is then a plain sum over its tokens, for any division into micro-batches.
    """
    if spec.aggregation == "token_mean":
        return torch.full(lengths.shape, 1.0 / int(lengths.sum()))
    if spec.aggregation == "sequence_mean":
        return 1.0 / (len(lengths) * lengths.float())
    if spec.aggregation == "trajectory_mean":
        assert trajectories is not None
        return 1.0 / ((lengths / trajectories).sum() * trajectories.float())
    assert spec.constant_length is not None
    return torch.full(lengths.shape, 1.0 / (len(lengths) * spec.constant_length))


def logit_gradients(slope: Tensor, logprob: Tensor, temperature: Tensor) -> Tensor:
    """Return the length of the loss's gradient at the logits of each token, [N], up to a factor between 1 and sqrt(2).

    `slope` [N] is the derivative of the loss by the token's log-probability `logprob` [N]. With p = softmax(logits / T)
    the gradient is slope (onehot(y) - p) / T, and the sum of the other tokens' p^2 is at most (1 - p[y])^2. The entropy
    bonus is left out.
    """
    return slope.abs() * -torch.expm1(logprob.clamp(max=0.0)) / temperature


def kept_by_mask(spec: LossSpec, mismatch: Tensor, row: Tensor) -> Tensor:
    """Return which tokens the recipe's mask keeps, [N]. `mismatch` [N] is log pi_old - log pi_sampler of each token.

    A token is kept if the exp of a mismatch is within the bounds. For the mask "token" this is the token's own
    mismatch, for "sequence" the sum over its row, and for "geometric" the mean over its row.
    """
    log_quotient = mismatch
    if spec.mask == "sequence":
        log_quotient = _row_sum(mismatch, row)
    elif spec.mask == "geometric":
        log_quotient = _row_mean(mismatch, row)
    quotient = log_quotient.exp()
    low, high = spec.mask_bounds
    return (quotient >= low) & (quotient <= high)


def policy_loss(spec: LossSpec, tokens: Tokens) -> LossParts:
    """Return the loss of a pass: the weighted sum over tokens of w * (policy loss + kl * k3) - entropy * H.

    The policy ratio r is exp(new - old) of each token, or its geometric mean over the row (ratio "sequence", GSPO). The
    off-policy correction w = min(exp(old - sampler), tis_cap) has no gradient. The policy loss of a token is:

    - ppo: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A). With dual_clip c it is at most c |A| if A < 0.
    - cispo: -stop_gradient(clip(r)) A new
    - style "none": -r A
    - ratio "none": -A new, with w = min(exp(new - sampler), tis_cap)
    - `token_loss`: the result of the user's function

    k3 = exp(q) - q - 1 with q = reference - new, continued along its tangent above exp(q) = KL_SLOPE. With kl_in
    "reward" there is no k3, and A is less by kl * (old - reference). Raises LearnerError if the user's function does
    not return a loss.
    """
    if tokens.reference is not None and spec.kl_in == "reward":
        tokens = replace(tokens, advantage=tokens.advantage - spec.kl * (tokens.old - tokens.reference))
    ratio, correction, truncated = _importance_weights(spec, tokens)
    if spec.token_loss:
        gain = -_own_loss(spec.token_loss, tokens)
        clipped = torch.zeros_like(ratio, dtype=torch.bool)
    else:
        gain, clipped = _clipped_gain(spec, tokens, ratio)
    per_token = -correction * gain
    kl = None
    if tokens.reference is not None:
        kl = _k3(tokens.reference - tokens.new)
        if spec.kl_in == "loss":
            per_token = per_token + correction * spec.kl * kl
    if spec.entropy:
        assert tokens.entropy is not None
        bonus = tokens.entropy if tokens.exploration is None else tokens.exploration * tokens.entropy
        per_token = per_token - spec.entropy * bonus
    loss = (tokens.weight * per_token).sum()
    return LossParts(loss, ratio.detach(), clipped, truncated, None if kl is None else kl.detach())


class _ImportanceWeights(NamedTuple):
    """Figures of each token, [N]. See `policy_loss` for the formulas."""

    ratio: Tensor
    """The policy ratio, with gradient; for ratio "none" new / sampler, without."""
    correction: Tensor
    """The weight that corrects for the sampler, without gradient; 1 without `tis_cap`."""
    truncated: Tensor
    """Whether `tis_cap` has truncated the correction."""


def _importance_weights(spec: LossSpec, tokens: Tokens) -> _ImportanceWeights:
    """Compute the policy ratio and the off-policy correction of each token."""
    if spec.ratio == "none":
        # The loss does not contain the ratio, which is only a metric. One correction does the work of both: it weights
        # the sampler's tokens for the present policy, so it also covers earlier steps of this update.
        change = tokens.new.detach() - tokens.sampler
        mismatch = change
    else:
        # The ratio compares the policy with itself before the update, which is compared with the sampler separately.
        change = tokens.new - tokens.old
        mismatch = tokens.old - tokens.sampler
        if spec.ratio == "sequence":
            change = _row_mean(change, tokens.row, tokens.rows)
            mismatch = _row_mean(mismatch, tokens.row, tokens.rows)
    ratio = change.exp()
    if spec.tis_cap is None:
        return _ImportanceWeights(ratio, torch.ones_like(ratio), torch.zeros_like(ratio, dtype=torch.bool))
    quotient = mismatch.exp()
    return _ImportanceWeights(ratio, quotient.clamp(max=spec.tis_cap), quotient > spec.tis_cap)


def _clipped_gain(spec: LossSpec, tokens: Tokens, ratio: Tensor) -> tuple[Tensor, Tensor]:
    """Return the negative policy loss of each token, before weights, and whether the clip stops its gradient."""
    advantage = tokens.advantage
    nothing_clipped = torch.zeros_like(ratio, dtype=torch.bool)
    if spec.ratio == "none":
        return advantage * tokens.new, nothing_clipped
    if spec.style == "none":
        return ratio * advantage, nothing_clipped

    low, high = 1.0 - spec.clip_low, 1.0 + spec.clip_high
    below = ratio.detach() < low
    above = ratio.detach() > high
    if spec.style == "cispo":
        return ratio.detach().clamp(low, high) * advantage * tokens.new, below | above

    # PPO clips a token only in the direction of its advantage.
    clipped = ((advantage > 0) & above) | ((advantage < 0) & below)
    gain = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    if spec.dual_clip is not None:
        floor = spec.dual_clip * advantage
        below_floor = (advantage < 0) & (gain.detach() < floor)
        gain = torch.where(below_floor, floor, gain)
        clipped = clipped | below_floor
    return gain, clipped


def _own_loss(function: str, tokens: Tokens) -> Tensor:
    """Return the loss of each token, [N], by the user's `function` ("module:name")."""
    try:
        loss = own_function("token_loss", function)(tokens)
    except Exception as error:
        raise LearnerError(
            f"{function} raised {error_text(error)}{error_origin(error)}.", "Correct the function."
        ) from error
    if not isinstance(loss, Tensor) or loss.shape != tokens.new.shape or not loss.requires_grad:
        cause = f"{function} returned no loss for each of {len(tokens.new)} tokens with a gradient to tokens.new."
        raise LearnerError(cause, "Return a tensor of the shape of tokens.new that is computed from it.")
    return loss


def _k3(gap: Tensor) -> Tensor:
    """Return exp(q) - q - 1 for each `gap` q, [N]. Above exp(q) = KL_SLOPE, it is continued along its tangent there."""
    bounded = gap.clamp(max=math.log(KL_SLOPE))
    return bounded.exp() * (1.0 + gap - bounded) - gap - 1.0


def _row_mean(values: Tensor, row: Tensor, rows: int | None = None) -> Tensor:
    """Return the mean over its row for each token, [N]. `values` and `row` are [N]."""
    return _row_sum(values, row, rows) / _row_sum(torch.ones_like(values), row, rows)


def _row_sum(values: Tensor, row: Tensor, rows: int | None = None) -> Tensor:
    """Return the sum over its row for each token, [N]. `values` and `row` are [N]."""
    if rows is None:
        rows = int(row.max()) + 1
    return torch.zeros(rows, dtype=values.dtype, device=values.device).index_add(0, row, values)[row]
