"""Training rows: which can be trained on, which of their tokens count, and which rows go through the model together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise

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


def token_advantages(rows: Sequence[TrainRow]) -> Tensor:
    """[tokens] advantage of each response token, rows in order, float32: the row's own where it has one for each."""
    parts = [row.advantages or (row.advantage,) * len(row.response_ids) for row in rows]
    return torch.from_numpy(np.concatenate([np.asarray(part, np.float32) for part in parts]))


def sampler_logprobs(rows: Sequence[TrainRow]) -> Tensor:
    """[tokens] log pi_sampler of each response token, rows in order, float32, in nats."""
    return torch.from_numpy(np.concatenate([np.asarray(row.logprobs, np.float32) for row in rows]))


def teacher_logprobs(rows: Sequence[TrainRow]) -> Tensor:
    """[tokens] log pi_teacher of each response token, rows in order, float32, in nats. Raises GroupError."""
    for row in rows:
        if len(row.reference) != len(row.response_ids):
            raise GroupError(f"Row {row.id} of role {row.role!r} was scored by no teacher.", "Set distill.teacher.")
    return torch.from_numpy(np.concatenate([np.asarray(row.reference, np.float32) for row in rows]))


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


def mini_batches(rows: Sequence[TrainRow], size: int, generator: torch.Generator) -> list[list[int]]:
    """Split row indices into optimizer steps of at most `size` rows and nearly equal size, in random order.

    Rows of one prompt stay together (their advantages sum to about zero, and they share the prompt's computation)
    unless a step would grow over `size`; then they are split.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(row.prompt_ids, []).append(index)
    members = list(groups.values())
    order = [index for group in torch.randperm(len(members), generator=generator).tolist() for index in members[group]]
    steps = -(-len(order) // size)
    cuts = [_group_boundary(rows, order, len(order) * step // steps) for step in range(steps + 1)]
    batches = [order[start:end] for start, end in pairwise(cuts)]
    if any(not 0 < len(batch) <= size for batch in batches):
        cuts = [len(order) * step // steps for step in range(steps + 1)]
        batches = [order[start:end] for start, end in pairwise(cuts)]
    return batches


def _group_boundary(rows: Sequence[TrainRow], order: Sequence[int], cut: int) -> int:
    while 0 < cut < len(order) and rows[order[cut - 1]].prompt_ids == rows[order[cut]].prompt_ids:
        cut -= 1
    return cut


def passes(
    rows: Sequence[TrainRow], indices: Sequence[int], budget: int, *, shared: bool, rank: int = 0, size: int = 1
) -> list[list[int]]:
    """The micro-batches that `rank` of `size` computes of `indices`; equally many on each rank, so the last ones may be
    empty."""
    parts = [micro_batches(rows, part, budget, shared) for part in rank_parts(rows, indices, size)]
    most = max(map(len, parts))
    return parts[rank] + [[]] * (most - len(parts[rank]))


def rank_parts(rows: Sequence[TrainRow], indices: Sequence[int], size: int) -> list[list[int]]:
    """Split `indices` into `size` parts of nearly equal tokens, rows of one prompt together unless they are many.

    A cut through the rows of a prompt computes the prompt once more: it is moved to their edge where the parts differ
    by less than a prompt after that. With fewer rows than `size` some parts are empty.
    """
    if size == 1:
        return [list(indices)]
    ordered = sorted(indices, key=lambda index: rows[index].prompt_ids)
    until = [0, *accumulate(len(rows[index].prompt_ids) + len(rows[index].response_ids) for index in ordered)]
    cuts = [0]
    for part in range(1, size):
        goal = until[-1] * part / size
        cut = min(range(cuts[-1], len(until)), key=lambda at: abs(until[at] - goal))
        cuts.append(_near_edge(rows, ordered, until, cut, cuts[-1]))
    return [ordered[start:end] for start, end in pairwise([*cuts, len(ordered)])]


def _near_edge(rows: Sequence[TrainRow], ordered: Sequence[int], until: Sequence[int], cut: int, least: int) -> int:
    def inside(at: int) -> bool:
        return 0 < at < len(ordered) and rows[ordered[at - 1]].prompt_ids == rows[ordered[at]].prompt_ids

    edges = []
    for direction in (-1, 1):
        at = cut
        while inside(at):
            at += direction
        edges.append(at)
    found = [at for at in edges if at > least and abs(until[at] - until[cut]) <= len(rows[ordered[cut - 1]].prompt_ids)]
    return min(found, key=lambda at: abs(until[at] - until[cut]), default=cut)


def micro_batches(rows: Sequence[TrainRow], indices: Sequence[int], budget: int, shared: bool) -> list[list[int]]:
    """Split `indices` into passes of at most `budget` padded tokens, rows of like length together.

    With `shared`, rows of one prompt are neighbours and the prompt counts once. A row over the budget goes alone.
    """

    def by_prompt(index: int) -> tuple[int, tuple[int, ...], int]:
        row = rows[index]
        return (len(row.prompt_ids), row.prompt_ids, len(row.response_ids))

    def by_length(index: int) -> int:
        return len(rows[index].prompt_ids) + len(rows[index].response_ids)

    ordered = sorted(indices, key=by_prompt) if shared else sorted(indices, key=by_length)
    batches: list[list[int]] = []
    prompts, longest_prompt, longest_response, longest = 0, 0, 0, 0
    last: tuple[int, ...] | None = None
    for index in ordered:
        row = rows[index]
        prompt, response = len(row.prompt_ids), len(row.response_ids)
        prompts += row.prompt_ids != last
        longest_prompt, longest_response = max(longest_prompt, prompt), max(longest_response, response)
        longest = max(longest, prompt + response)
        count = len(batches[-1]) + 1 if batches else 1
        tokens = prompts * longest_prompt + count * longest_response if shared else count * longest
        if not batches or tokens > budget:
            batches.append([])
            prompts, longest_prompt, longest_response, longest = 1, prompt, response, prompt + response
        batches[-1].append(index)
        last = row.prompt_ids
    return batches
