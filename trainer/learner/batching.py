"""Training rows: which can be trained on, and which of them go through the model together."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from itertools import pairwise

import numpy as np
import torch

from cotune.algorithms.samples import TrainRow
from cotune.errors import GroupError
from cotune.trainer.learner.token_tree import cuts_within, distinct_tokens, even_cuts, sort_sequences


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


def mini_batches(rows: Sequence[TrainRow], size: int, generator: torch.Generator) -> list[list[int]]:
    """Split the indices of rows into mini-batches, one for each optimizer step. They have at most `size` rows and
    nearly equal sizes, and are in random order.

    Rows of one conversation stay together, because later turns begin with the earlier ones, which a pass then computes
    once. If a conversation does not fit, its prompts are split up, and rows of one prompt stay together: their
    advantages sum to about zero. If they do not fit either, rows are placed one by one.
    """
    steps = math.ceil(len(rows) / size)
    by_conversation = conversation_numbers(rows)
    by_prompt = _number_keys([(row.prompt_ids, row.images) for row in rows])
    by_row = list(range(len(rows)))
    # Each list numbers the units of rows that stay together. Try the largest units first.
    for unit_of_row in (by_conversation, by_prompt, by_row):
        batches = _distribute_units(unit_of_row, steps, generator)
        if all(0 < len(batch) <= size for batch in batches):
            break
    return [batches[step] for step in torch.randperm(steps, generator=generator).tolist()]


def _distribute_units(unit_of_row: Sequence[int], steps: int, generator: torch.Generator) -> list[list[int]]:
    """Distribute the indices of rows over `steps` mini-batches of similar size. A unit is a set of rows that stay
    together: `unit_of_row` has the number of each row's unit."""
    rows_of_unit: dict[int, list[int]] = {}
    for row, unit in enumerate(unit_of_row):
        rows_of_unit.setdefault(unit, []).append(row)

    # The largest units first, each into the smallest mini-batch so far. Units of the same size are in random order.
    units = [rows_of_unit[unit] for unit in torch.randperm(len(rows_of_unit), generator=generator).tolist()]
    batches: list[list[int]] = [[] for _ in range(steps)]
    for rows in sorted(units, key=len, reverse=True):
        min(batches, key=len).extend(rows)
    return batches


def _number_keys(keys: Sequence[Hashable]) -> list[int]:
    """Number the keys from 0, in order of their first occurrence. Equal keys have the same number."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def conversation_numbers(rows: Sequence[TrainRow]) -> list[int]:
    """Return a number for each row, equal for rows of one conversation.

    The prompt of a later turn begins with the whole prompt of an earlier one. So two rows are of one conversation if
    one prompt begins with the other, or if both begin with the prompt of a third row. Prompts with different first
    images are of different conversations.
    """
    first_images = _number_keys([row.images[:1] for row in rows])
    # The number of the first image stands before the tokens, so that prompts with other images share no beginning.
    prompt_of_row = [(image, *row.prompt_ids) for image, row in zip(first_images, rows, strict=True)]
    prompts = list(dict.fromkeys(prompt_of_row))
    order, common = sort_sequences(prompts)
    conversation_of: dict[tuple[int, ...], int] = {}
    # In sorted order a prompt comes after its beginnings. `beginnings` are the prompts that the present one begins
    # with, itself included, the shortest first. A prompt has the conversation of the shortest, or opens a new one.
    beginnings: list[tuple[int, ...]] = []
    for index, shared in zip(order, common, strict=True):
        prompt = prompts[index]
        while beginnings and len(beginnings[-1]) > shared:
            beginnings.pop()
        beginnings.append(prompt)
        new_conversation = len(conversation_of)  # no conversation has this number yet
        conversation_of[prompt] = conversation_of.get(beginnings[0], new_conversation)
    return _number_keys([conversation_of[prompt] for prompt in prompt_of_row])


def passes_of_rank(
    rows: Sequence[TrainRow], indices: Sequence[int], budget: int, *, shared: bool, rank: int = 0, size: int = 1
) -> list[list[int]]:
    """Return the passes (micro-batches) over the rows at `indices` that `rank` of `size` ranks computes.

    All ranks get the same number of passes, so the last passes of some ranks may be empty.
    """
    passes = [micro_batches(rows, part, budget, shared) for part in rank_parts(rows, indices, size, shared)]
    most_passes = max(map(len, passes))
    empty_passes: list[list[int]] = [[] for _ in range(most_passes - len(passes[rank]))]
    return passes[rank] + empty_passes


def rank_parts(rows: Sequence[TrainRow], indices: Sequence[int], size: int, shared: bool) -> list[list[int]]:
    """Split `indices` into one part for each of `size` ranks, so that the part with most tokens has as few tokens as
    possible.

    With `shared`, tokens that rows of a part have in common count once. With fewer rows than ranks, some parts are
    empty.
    """
    if size == 1:
        return [list(indices)]
    sequences = [tokens_of(rows[index]) for index in indices]
    order, common = sort_sequences(sequences)  # `order` has the numbers of the sequences
    if not shared:
        common = np.zeros_like(common)
    lengths = np.asarray([len(sequences[number]) for number in order], np.int64)
    parts: list[list[int]] = []
    for start, end in pairwise(even_cuts(lengths, common, size)):
        parts.append([indices[number] for number in order[start:end]])
    return parts


def tokens_of(row: TrainRow) -> tuple[int, ...]:
    """The tokens that go through the model: the last one of a response predicts nothing."""
    return row.prompt_ids + row.response_ids[:-1]


def pass_tokens(rows: Sequence[TrainRow], shared: bool) -> int:
    """Return the number of tokens that a pass over these rows computes: with `shared` the distinct tokens, else all
    rows padded to the longest."""
    sequences = [tokens_of(row) for row in rows]
    if not shared:
        return len(rows) * max(map(len, sequences), default=0)
    _, shared_tokens = sort_sequences(sequences)
    return sum(map(len, sequences)) - int(shared_tokens.sum())


def micro_batches(rows: Sequence[TrainRow], indices: Sequence[int], budget: int, shared: bool) -> list[list[int]]:
    """Split `indices` into passes of at most `budget` tokens, as `PassPlan` does."""
    return PassPlan(rows, indices, shared).passes(budget)


class PassPlan:
    """Divides rows into passes of any size. The rows are sorted once, so that they are divided quickly for each size.

    With `shared`, rows are in the order of a walk through the tree of their tokens. Tokens that the rows of a pass have
    in common are computed once, and the tree is cut where few tokens have to be computed again. Without `shared`, rows
    are padded, and rows of similar length share a pass.
    """

    def __init__(self, rows: Sequence[TrainRow], indices: Sequence[int], shared: bool) -> None:
        """Sort the rows at `indices` of `rows` once. `shared` says whether the model computes common beginnings only
        once."""
        sequences = [tokens_of(rows[index]) for index in indices]
        self._shared = shared
        # `order` has the numbers of the sequences: by the tree of their tokens, or the shortest first.
        if shared:
            order, self._common = sort_sequences(sequences)
        else:
            order = sorted(range(len(sequences)), key=lambda number: len(sequences[number]))
        self._indices = [indices[number] for number in order]
        self._lengths = np.asarray([len(sequences[number]) for number in order], np.int64)
        self._cuts_by_budget: dict[int, list[int]] = {}

    def passes(self, budget: int) -> list[list[int]]:
        """The rows of each pass of at most `budget` tokens. A row over the budget goes alone."""
        return [self._indices[start:end] for start, end in pairwise(self._cuts(budget))]

    def computed(self, budget: int) -> int:
        """Return the number of tokens that the passes of this budget compute."""
        cuts = self._cuts(budget)
        if self._shared:
            return distinct_tokens(self._lengths, self._common, cuts)
        return sum(int((end - start) * self._lengths[end - 1]) for start, end in pairwise(cuts))

    def _cuts(self, budget: int) -> list[int]:
        """Return the index of the first row of each pass, and the number of rows. Callers need the same budget several
        times, so the result is stored."""
        if budget not in self._cuts_by_budget:
            self._cuts_by_budget[budget] = self._find_cuts(budget)
        return self._cuts_by_budget[budget]

    def _find_cuts(self, budget: int) -> list[int]:
        """Return the index of the first row of each pass of at most `budget` tokens, and, at the end, the number of
        rows."""
        if self._shared:
            return cuts_within(self._lengths, self._common, budget)
        if not self._indices:
            return [0]
        cuts = [0]
        for row, length in enumerate(self._lengths.tolist()):
            # Lengths rise, so this row is the longest of its pass so far, and the others are padded to its length.
            rows_with_this = row - cuts[-1] + 1
            if rows_with_this > 1 and rows_with_this * length > budget:
                cuts.append(row)
        return [*cuts, len(self._indices)]
