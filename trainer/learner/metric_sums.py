"""Sums of per-token facts over an update, in all and per role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from cotune.integrations.models.device_copies import to_device
from cotune.trainer.learner.dist import ProcessGroup
from cotune.trainer.learner.loss import LossParts, Tokens

MAXIMA = ("ratio_max", "sampler_gap_max")
"""Figures that are the largest value of any token. All other figures are means over tokens."""
_OF_TRAINED_TOKENS = (
    "clip_share", "tis_clipped_share", "ratio_mean", "ratio_max", "kl", "sampler_gap_mean", "sampler_gap_max",
    "sampler_kl",
)  # fmt: skip
TOKENS_OF = {**dict.fromkeys(_OF_TRAINED_TOKENS, "tokens"), "entropy": "entropy_tokens"}
"""For each figure, the name of the count of its tokens. The entropy is also estimated for tokens that no pass
computes."""
GRADIENT = "squared_gradients"
SUMS = ("tokens", "entropy_tokens", GRADIENT, *(name for name in TOKENS_OF if name not in MAXIMA))


class MetricSums:
    """Adds up the reports of `policy_loss`, token by token, by the role of each row."""

    def __init__(self, roles: Sequence[str]) -> None:
        """`roles` has the role of each row."""
        self._names = sorted(set(roles))
        self._role = torch.tensor([self._names.index(role) for role in roles])  # [rows] index into _names
        self._sums: dict[str, Tensor] = {}  # by figure, [roles]: the sum over tokens, or the maximum
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
        role_of_row = to_device(self._role[torch.tensor(rows)], tokens.row.device)
        self._add(role_of_row.index_select(0, tokens.row), facts)

    def skip(self, row: Tensor, logprobs: Tensor) -> None:
        """Add the entropy of tokens that no pass computes. `row` [N] is the row of each token, and `logprobs` [N] its
        log-probability under the sampler: the mean of -log pi estimates the entropy."""
        facts = {"entropy": -logprobs, "entropy_tokens": torch.ones_like(logprobs)}
        self._add(to_device(self._role[row], logprobs.device), facts)

    def _add(self, role: Tensor, facts: Mapping[str, Tensor]) -> None:
        """Add values of tokens, [N] by figure, to the figures of their roles. `role` [N] has the index of each token's
        role."""
        for name, values in facts.items():
            before = self._sums.get(name)
            if name in MAXIMA:
                maxima = values.new_zeros(len(self._names)).scatter_reduce(0, role, values, "amax")
                self._sums[name] = maxima if before is None else torch.maximum(before, maxima)
            else:
                # float32 loses counts above 2^24.
                sums = torch.zeros(len(self._names), dtype=torch.float64, device=values.device)
                sums.index_add_(0, role, values.double())
                self._sums[name] = sums if before is None else before + sums

    def metrics(self, group: ProcessGroup) -> dict[str, float]:
        """Return means, maxima and token counts over all ranks. With several roles, each role also has them, as
        `<role>/<name>`, and `<role>/gradient_share`. Without tokens there are no means and maxima.

        `computed_tokens` is the number of tokens that the passes of all ranks have put through the model.
        """
        sums = self._sum_over_ranks(group)
        metrics = _means({name: _over_roles(name, values) for name, values in sums.items()})
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
        """Return sums and maxima over all ranks, [roles] by figure. "tokens" is always among them, and each figure that
        any rank has counted: a rank may have no rows."""
        names = (*SUMS, *MAXIMA)
        was_counted = group.max(torch.tensor([float(name in self._sums) for name in names])).tolist()

        # All ranks must exchange tensors of the same shape, so figures that this rank has not counted are zeros.
        device = next(iter(self._sums.values())).device if self._sums else None
        zeros = torch.zeros(len(self._names), dtype=torch.float64, device=device)
        stacked = torch.stack([self._sums.get(name, zeros).double() for name in names])  # [figures, roles]
        # One copy for all figures, so that the host waits for the device only once.
        of_rank = stacked.cpu()
        sums = group.sum(of_rank[: len(SUMS)])
        maxima = group.max(of_rank[len(SUMS) :])

        over_ranks: dict[str, Tensor] = {}
        for name, counted, values in zip(names, was_counted, torch.cat([sums, maxima]), strict=True):
            if counted or name == "tokens":
                over_ranks[name] = values
        return over_ranks


def _over_roles(name: str, values: Tensor) -> float:
    """Return the sum of a figure over the roles, or its maximum. `values` is [roles]."""
    return float(values.max() if name in MAXIMA else values.sum())


def _means(sums: dict[str, float]) -> dict[str, float]:
    """Return `tokens`, and each figure that has any tokens: its mean over them, or its maximum."""
    means = {"tokens": sums["tokens"]}
    for name, count_name in TOKENS_OF.items():
        if name not in sums or not sums[count_name]:
            continue
        means[name] = sums[name] if name in MAXIMA else sums[name] / sums[count_name]
    return means
