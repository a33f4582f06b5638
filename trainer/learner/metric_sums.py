"""Sums of per-token facts over an update, in all and per role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from cotune.trainer.learner.device import to_device
from cotune.trainer.learner.dist import ProcessGroup
from cotune.trainer.learner.loss import LossParts, Tokens

MAXIMA = ("ratio_max", "sampler_gap_max")
_OF_ALL = (
    "clip_share", "tis_clipped_share", "ratio_mean", "ratio_max", "kl", "sampler_gap_mean", "sampler_gap_max",
    "sampler_kl",
)  # fmt: skip
TOKENS_OF = {**dict.fromkeys(_OF_ALL, "tokens"), "entropy": "entropy_tokens"}
"""The count of the tokens that each figure is a mean, or the largest, of."""
GRADIENT = "squared_gradients"
SUMS = ("tokens", "entropy_tokens", GRADIENT, *(name for name in TOKENS_OF if name not in MAXIMA))


class MetricSums:
    """Adds up the reports of `policy_loss`, token by token, by the role of each row."""

    def __init__(self, roles: Sequence[str]) -> None:
        self._names = sorted(set(roles))
        self._role = torch.tensor([self._names.index(role) for role in roles])
        self._sums: dict[str, Tensor] = {}
        self._computed = 0

    def add(self, rows: Sequence[int], tokens: Tokens, parts: LossParts, gradients: Tensor, *, computed: int) -> None:
        """Count a pass over `rows` (indices into the roles), which put `computed` tokens through the model.

        `gradients` [N] has the length of each token's gradient at the logits (`logit_gradients`).
        """
        self._computed += computed
        ones = torch.ones_like(tokens.old)
        gap = tokens.old - tokens.sampler
        facts = {
            "tokens": ones,
            "clip_share": parts.clipped.float(),
            "tis_clipped_share": parts.truncated.float(),
            "ratio_mean": parts.ratio,
            "ratio_max": parts.ratio,
            "sampler_gap_mean": gap.abs(),
            "sampler_gap_max": gap.abs(),
            "sampler_kl": gap.exp() - gap - 1.0,
            GRADIENT: gradients.double().square(),
        }
        if tokens.entropy is not None:
            facts |= {"entropy": tokens.entropy.detach(), "entropy_tokens": ones}
        if parts.kl is not None:
            facts["kl"] = parts.kl
        roles = to_device(self._role[torch.tensor(rows)], tokens.row.device)
        self._add(roles.index_select(0, tokens.row), facts)

    def skip(self, row: Tensor, logprobs: Tensor) -> None:
        """Count tokens that no pass computes, by their `row` [N] and the sampler's log-probability [N]: the mean of
        -log pi estimates the entropy."""
        facts = {"entropy": -logprobs, "entropy_tokens": torch.ones_like(logprobs)}
        self._add(to_device(self._role[row], logprobs.device), facts)

    def _add(self, owner: Tensor, facts: Mapping[str, Tensor]) -> None:
        """Add values of tokens, [N] by name, to the figures of their roles. `owner` [N] has the number of each token's
        role."""
        for name, values in facts.items():
            before = self._sums.get(name)
            if name in MAXIMA:
                maxima = values.new_zeros(len(self._names)).scatter_reduce(0, owner, values, "amax")
                self._sums[name] = maxima if before is None else torch.maximum(before, maxima)
            else:
                # float32 loses counts above 2^24.
                sums = torch.zeros(len(self._names), dtype=torch.float64, device=values.device)
                sums.index_add_(0, owner, values.double())
                self._sums[name] = sums if before is None else before + sums

    def metrics(self, group: ProcessGroup) -> dict[str, float]:
        """Return means, maxima and token counts over all ranks. With several roles, each role also has them, as
        `<role>/<name>`, and `<role>/gradient_share`. Without tokens there are no means and maxima.

        `computed_tokens` is the number of tokens that the passes of all ranks have put through the model.
        """
        sums = self._sum_over_ranks(group)
        metrics = _means({name: _pool(name, values) for name, values in sums.items()})
        if len(self._names) > 1:
            for index, role in enumerate(self._names):
                of_role = _means({name: float(values[index]) for name, values in sums.items()})
                metrics |= {f"{role}/{name}": value for name, value in of_role.items()}
            metrics |= self._gradient_shares(sums)
        metrics["computed_tokens"] = float(group.sum(torch.tensor([self._computed])).item())
        return metrics

    def _gradient_shares(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the share of each role in the gradient, as `<role>/gradient_share`; empty without any gradient.

        The gradients of different tokens point in nearly independent directions, so the length of their sum is about
        the root of the sum of their squared lengths.
        """
        lengths = sums[GRADIENT].sqrt() if GRADIENT in sums else torch.zeros(len(self._names))
        total = float(lengths.sum())
        if not 0.0 < total < float("inf"):
            return {}
        return {
            f"{role}/gradient_share": length / total for role, length in zip(self._names, lengths.tolist(), strict=True)
        }

    def _sum_over_ranks(self, group: ProcessGroup) -> dict[str, Tensor]:
        """Return sums and maxima over all ranks, for each name that any rank has counted: a rank may have no rows."""
        empty = torch.zeros(len(self._names), dtype=torch.float64)
        names = (*SUMS, *MAXIMA)
        counted_by_any = group.max(torch.tensor([float(name in self._sums) for name in names])).tolist()
        of_rank = {name: self._sums.get(name, empty).double().cpu() for name in names}
        sums = dict(zip(SUMS, group.sum(torch.stack([of_rank[name] for name in SUMS])), strict=True))
        maxima = dict(zip(MAXIMA, group.max(torch.stack([of_rank[name] for name in MAXIMA])), strict=True))
        reduced: dict[str, Tensor] = {}
        for name, counted in zip(names, counted_by_any, strict=True):
            if counted or name == "tokens":
                reduced[name] = sums[name] if name in sums else maxima[name]
        return reduced


def _pool(name: str, values: Tensor) -> float:
    return float(values.max() if name in MAXIMA else values.sum())


def _means(sums: dict[str, float]) -> dict[str, float]:
    means = {"tokens": sums["tokens"]}
    for name, counted in TOKENS_OF.items():
        if name in sums and (count := sums[counted]):
            means[name] = sums[name] if name in MAXIMA else sums[name] / count
    return means
