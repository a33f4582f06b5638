"""Sums of per-token facts over an update, in all and per role."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cotune.trainer.learner.dist import ProcessGroup
from cotune.trainer.learner.loss import LossParts, Tokens

MEANS = ("clip_share", "tis_clipped_share", "entropy", "ratio_mean", "kl")
FIRST = ("sampler_gap_mean", "sampler_kl")
MAXIMA = ("ratio_max", "sampler_gap_max")
SUMS = ("tokens", "first_tokens", *MEANS, *FIRST)


class MetricSums:
    """Adds up what `policy_loss` reports, token by token, by the role of each row."""

    def __init__(self, roles: Sequence[str]) -> None:
        self._names = sorted(set(roles))
        self._role = torch.tensor([self._names.index(role) for role in roles])
        self._sums: dict[str, Tensor] = {}
        self._computed = 0

    def add(self, rows: Sequence[int], tokens: Tokens, parts: LossParts, *, computed: int, first: bool) -> None:
        """Count a pass over `rows` (indices into the roles), which put so many tokens through the model. `first`: no
        optimizer step has been taken yet."""
        self._computed += computed
        owner = self._role[torch.tensor(rows)].to(tokens.row.device)[tokens.row]
        new = tokens.new.detach()
        facts = {
            "tokens": torch.ones_like(new),
            "clip_share": parts.clipped.float(),
            "tis_clipped_share": parts.truncated.float(),
            "ratio_mean": parts.ratio,
            "ratio_max": parts.ratio,
        }
        if tokens.entropy is not None:
            facts["entropy"] = tokens.entropy.detach()
        if parts.kl is not None:
            facts["kl"] = parts.kl
        trainer = tokens.old if tokens.old is not None else new if first else None
        if trainer is not None:
            gap = trainer - tokens.sampler
            facts["first_tokens"] = torch.ones_like(new)
            facts["sampler_gap_mean"] = facts["sampler_gap_max"] = gap.abs()
            facts["sampler_kl"] = gap.exp() - gap - 1.0
        for name, values in facts.items():
            if name in MAXIMA:
                found = values.new_zeros(len(self._names)).scatter_reduce(0, owner, values, "amax")
                self._sums[name] = torch.maximum(self._sums[name], found) if name in self._sums else found
            else:
                found = torch.zeros(len(self._names), dtype=torch.float64, device=values.device)
                found.index_add_(0, owner, values.double())
                self._sums[name] = self._sums[name] + found if name in self._sums else found

    def metrics(self, group: ProcessGroup) -> dict[str, float]:
        """Means, maxima and token counts over all ranks; also per role, as `<role>/<name>`, where there are several.
        And `computed_tokens`, what all ranks' passes put through the model."""
        sums = self._reduced(group)
        found = _means({name: _pool(name, values) for name, values in sums.items()})
        if len(self._names) > 1:
            for index, role in enumerate(self._names):
                part = _means({name: float(values[index]) for name, values in sums.items()})
                found |= {f"{role}/{name}": value for name, value in part.items()}
        found["computed_tokens"] = float(group.sum(torch.tensor([self._computed])).item())
        return found

    def _reduced(self, group: ProcessGroup) -> dict[str, Tensor]:
        """Sums and maxima over all ranks, of what any of them has counted; a rank may have had no rows."""
        empty = torch.zeros(len(self._names), dtype=torch.float64)
        known = (*SUMS, *MAXIMA)
        counted = group.max(torch.tensor([float(name in self._sums) for name in known])).tolist()
        mine = {name: self._sums.get(name, empty).double().cpu() for name in known}
        sums = dict(zip(SUMS, group.sum(torch.stack([mine[name] for name in SUMS])), strict=True))
        maxima = dict(zip(MAXIMA, group.max(torch.stack([mine[name] for name in MAXIMA])), strict=True))
        found = {**sums, **maxima}
        return {name: found[name] for name, any_rank in zip(known, counted, strict=True) if any_rank}


def _pool(name: str, values: Tensor) -> float:
    return float(values.max() if name in MAXIMA else values.sum())


def _means(sums: dict[str, float]) -> dict[str, float]:
    first = sums.pop("first_tokens", 0.0)
    divisors = dict.fromkeys(MEANS, sums["tokens"]) | dict.fromkeys(FIRST, first)
    return {name: value / max(divisors.get(name, 1.0), 1.0) for name, value in sums.items()}
