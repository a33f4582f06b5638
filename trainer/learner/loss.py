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

    `new`, `sampler`, `old` are log-probabilities in nats: of the weights being trained (with gradient), of the sampler,
    and of the policy before the update. `row` numbers the row of each token from 0. `weight` is the token's share of
    the loss (`row_weights`). `entropy` (with gradient) and `reference` are needed by their loss terms only;
    `exploration` multiplies the weight of `entropy`, where given. There are `rows` rows; a pass gives the number, as
    to read it from `row` would wait for the GPU.
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
        """The same without their graph, which holds the memory of the pass."""
        entropy = None if self.entropy is None else self.entropy.detach()
        return replace(self, new=self.new.detach(), entropy=entropy)


class LossParts(NamedTuple):
    """The loss (a scalar), and of each token [N], detached: the ratio, whether the clip holds it, whether the
    correction was truncated, and k3 of KL(policy || reference), None where no reference is given."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor
    truncated: Tensor
    kl: Tensor | None


KL_SLOPE = 10.0
"""How steep k3 gets, at most, where the policy is less likely than the reference: as at a quotient of this size."""


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
    """Return the length of the loss's gradient at the logits of each token, [N], but for a factor from 1 to sqrt(2).

    `slope` [N] is the derivative of the loss by the token's log-probability `logprob` [N]. With p = softmax(logits / T)
    the gradient is slope (onehot(y) - p) / T, and the sum of the other tokens' p^2 is at most (1 - p[y])^2. The entropy
    bonus is left out.
    """
    return slope.abs() * -torch.expm1(logprob.clamp(max=0.0)) / temperature


def kept_by_mask(spec: LossSpec, mismatch: Tensor, row: Tensor) -> Tensor:
    """Return which tokens the recipe's mask leaves in, [N]. `mismatch` [N] is log pi_old - log pi_sampler of each.

    A token stays in if the exp of a mismatch is within the bounds: its own (token), the sum of its row (sequence), or
    the mean of its row (geometric).
    """
    low, high = spec.mask_bounds
    if spec.mask == "sequence":
        mismatch = _row_sum(mismatch, row)
    elif spec.mask == "geometric":
        mismatch = _row_mean(mismatch, row)
    quotient = mismatch.exp()
    return (quotient >= low) & (quotient <= high)


def policy_loss(spec: LossSpec, tokens: Tokens) -> LossParts:
    """Weighted sum over tokens of w * (policy loss + kl * k3) - entropy * H.

    r = exp(new - old) per token, or its geometric mean over the row (ratio "sequence", GSPO), and
    w = min(exp(old - sampler), tis_cap), detached, corrects for a sampler that disagrees with the trainer.

    ppo: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A). cispo: -stop_gradient(clip(r)) A new. none: -r A.
    ppo with dual_clip c: never above c |A| where A < 0. Without a ratio: -A new with w = min(exp(new - sampler),
    tis_cap). k3 = exp(q) - q - 1 with q = reference - new, continued along its tangent above exp(q) = KL_SLOPE.
    With kl_in "reward" there is no k3; A is less by kl * (old - reference).
    `token_loss` replaces the policy loss of the tokens. Raises LearnerError if it does not return a loss.
    """
    if tokens.reference is not None and spec.kl_in == "reward":
        tokens = replace(tokens, advantage=tokens.advantage - spec.kl * (tokens.old - tokens.reference))
    ratio, correction, truncated = _importance_ratio(spec, tokens)
    if spec.token_loss:
        gain = -_own_loss(spec.token_loss, tokens)
        clipped = torch.zeros_like(ratio, dtype=torch.bool)
    else:
        gain, clipped = _clipped_loss(spec, tokens, ratio)
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


def _importance_ratio(spec: LossSpec, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor]:
    """Ratio (with gradient), correction weight (without), and where either was truncated."""
    cap = float("inf") if spec.tis_cap is None else spec.tis_cap
    if spec.ratio == "none":
        ratio = (tokens.new.detach() - tokens.sampler).exp()
        correction = torch.ones_like(ratio) if spec.tis_cap is None else ratio.clamp(max=cap)
        return ratio, correction, ratio > cap
    change = tokens.new - tokens.old
    if spec.ratio == "sequence":
        change = _row_mean(change, tokens.row, tokens.rows)
    ratio = change.exp()
    if spec.tis_cap is None:
        return ratio, torch.ones_like(ratio), torch.zeros_like(ratio, dtype=torch.bool)
    mismatch = tokens.old - tokens.sampler
    if spec.ratio == "sequence":
        mismatch = _row_mean(mismatch, tokens.row, tokens.rows)
    mismatch = mismatch.exp()
    return ratio, mismatch.clamp(max=cap), mismatch > cap


def _clipped_loss(spec: LossSpec, tokens: Tokens, ratio: Tensor) -> tuple[Tensor, Tensor]:
    """Return the negative policy loss of each token, before weights, and whether the clip bounds it."""
    advantage = tokens.advantage
    none = torch.zeros_like(ratio, dtype=torch.bool)
    if spec.ratio == "none":
        return advantage * tokens.new, none
    value = ratio.detach()
    if spec.style == "none":
        return ratio * advantage, none
    low, high = 1.0 - spec.clip_low, 1.0 + spec.clip_high
    if spec.style == "cispo":
        return value.clamp(low, high) * advantage * tokens.new, (value < low) | (value > high)
    clipped = ((advantage > 0) & (value > high)) | ((advantage < 0) & (value < low))
    gain = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    if spec.dual_clip is not None:
        floor = spec.dual_clip * advantage
        beyond = (advantage < 0) & (gain.detach() < floor)
        gain = torch.where(beyond, floor, gain)
        clipped = clipped | beyond
    return gain, clipped


def _own_loss(spec: str, tokens: Tokens) -> Tensor:
    """Return the loss of each token by the user's function."""
    try:
        loss = own_function("token_loss", spec)(tokens)
    except Exception as error:
        raise LearnerError(
            f"{spec} raised {error_text(error)}{error_origin(error)}.", "Correct the function."
        ) from error
    if not isinstance(loss, Tensor) or loss.shape != tokens.new.shape or not loss.requires_grad:
        cause = f"{spec} returned no loss for each of {len(tokens.new)} tokens with a gradient to tokens.new."
        raise LearnerError(cause, "Return a tensor of the shape of tokens.new that is computed from it.")
    return loss


def _k3(gap: Tensor) -> Tensor:
    """exp(q) - q - 1; where exp(q) is above KL_SLOPE the tangent there, whose slope is KL_SLOPE - 1."""
    bounded = gap.clamp(max=math.log(KL_SLOPE))
    return bounded.exp() * (1.0 + gap - bounded) - gap - 1.0


def _row_mean(values: Tensor, row: Tensor, rows: int | None = None) -> Tensor:
    """Mean over each row, given back to each of its tokens."""
    return _row_sum(values, row, rows) / _row_sum(torch.ones_like(values), row, rows)


def _row_sum(values: Tensor, row: Tensor, rows: int | None = None) -> Tensor:
    """Sum over each row, given back to each of its tokens."""
    if rows is None:
        rows = int(row.max()) + 1
    return torch.zeros(rows, dtype=values.dtype, device=values.device).index_add(0, row, values)[row]
