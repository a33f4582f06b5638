"""Training rows as tensors: which can be trained on, and which of their response tokens count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cotune.algorithms.recipes import LossSpec
from cotune.algorithms.samples import TrainRow
from cotune.errors import GroupError
from cotune.trainer.learner.loss import unmasked


def check_rows(rows: Sequence[TrainRow]) -> None:
    """Raises GroupError for rows that cannot be trained on."""
    if not rows:
        raise GroupError("There are no rows to train on.")
    for row in rows:
        problem = None
        if not row.prompt_ids or not row.response_ids:
            problem = "has an empty prompt or response"
        elif len(row.logprobs) != len(row.response_ids):
            problem = f"has {len(row.logprobs)} sampler log-probabilities for {len(row.response_ids)} response tokens"
        elif row.loss_mask and len(row.loss_mask) != len(row.response_ids):
            problem = f"has a loss mask of {len(row.loss_mask)} for {len(row.response_ids)} response tokens"
        elif not row.temperature > 0:
            problem = f"was sampled at temperature {row.temperature}, where log-probabilities are not defined"
        elif not (np.isfinite(row.advantage) and np.isfinite(row.logprobs).all()):
            problem = "has a non-finite advantage or log-probability"
        if problem:
            raise GroupError(f"Row {row.id} of role {row.role!r} {problem}.", "Leave it out of training.")


def lengths_of(rows: Sequence[TrainRow]) -> list[int]:
    """Response tokens of each row."""
    return [len(row.response_ids) for row in rows]


def row_of_token(rows: Sequence[TrainRow]) -> Tensor:
    """[tokens] number of the row, from 0, that each response token is of."""
    return torch.arange(len(rows)).repeat_interleave(torch.tensor(lengths_of(rows)))


def sampler_logprobs(rows: Sequence[TrainRow]) -> Tensor:
    """[tokens] log pi_sampler of each response token, rows in order, float32, in nats."""
    return torch.from_numpy(np.concatenate([np.asarray(row.logprobs, np.float32) for row in rows]))


def counted_tokens(rows: Sequence[TrainRow], loss: LossSpec, old: Sequence[Tensor] | None) -> list[Tensor]:
    """Which response tokens of each row count: neither masked in the row nor rejected by the loss's mask.

    `old` is log pi before the update, [tokens of the row] for each row, which the loss's mask compares with the
    sampler's. Returns a bool tensor [tokens of the row] for each row, on the CPU.
    """
    counted = torch.cat([torch.tensor(row.loss_mask or (True,) * len(row.response_ids)) for row in rows])
    if loss.mask != "none" and old is not None and counted.any():
        mismatch = torch.cat([values.cpu() for values in old]) - sampler_logprobs(rows)
        counted[counted.clone()] = unmasked(loss, mismatch[counted], row_of_token(rows)[counted])
    return list(counted.split(lengths_of(rows)))


def trajectory_tokens(rows: Sequence[TrainRow], counted: Sequence[Tensor]) -> Tensor:
    """[rows] tokens that count in the whole trajectory that each row belongs to."""
    sizes: Counter[str] = Counter()
    for row, tokens in zip(rows, counted, strict=True):
        sizes[row.trajectory or row.id] += int(tokens.sum())
    return torch.tensor([sizes[row.trajectory or row.id] for row in rows])


def masked_share(rows: Sequence[TrainRow], counted: Sequence[Tensor]) -> dict[str, float]:
    """`masked_share`: of the tokens that the rows' own masks leave in, how many the loss rejects.

    Also per role, as `<role>/masked_share`, where the rows are of several.
    """
    offered, kept = Counter[str](), Counter[str]()
    for row, tokens in zip(rows, counted, strict=True):
        offered[row.role] += sum(row.loss_mask) if row.loss_mask else len(row.response_ids)
        kept[row.role] += int(tokens.sum())
    found = {"masked_share": 1.0 - kept.total() / max(offered.total(), 1)}
    if len(offered) > 1:
        found |= {f"{role}/masked_share": 1.0 - kept[role] / max(offered[role], 1) for role in sorted(offered)}
    return found
