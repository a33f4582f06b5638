"""Training rows: which can be trained on, and which of them go through the model together."""

from __future__ import annotations

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
    """Split row indices into optimizer steps of at most `size` rows and nearly equal size, in random order.

    Rows of one conversation stay together, as later turns hold the earlier ones, and of these first the rows of one
    prompt, whose advantages sum to about zero. Where a step would grow over `size`, conversations are split, and then
    prompts.
    """
    steps = -(-len(rows) // size)
    # Keep the largest units whole that fit: conversations, then prompts, then single rows.
    for labels in (
        conversation_numbers(rows),
        _number_keys([(row.prompt_ids, row.images) for row in rows]),
        list(range(len(rows))),
    ):
        members: dict[int, list[int]] = {}
        for index, label in enumerate(labels):
            members.setdefault(label, []).append(index)
        # Random order, then the longest first into the step that is shortest so far.
        groups = [members[label] for label in torch.randperm(len(members), generator=generator).tolist()]
        batches: list[list[int]] = [[] for _ in range(steps)]
        for group in sorted(groups, key=len, reverse=True):
            min(batches, key=len).extend(group)
        if all(0 < len(batch) <= size for batch in batches):
            break
    return [batches[step] for step in torch.randperm(steps, generator=generator).tolist()]


def _number_keys(keys: Sequence[Hashable]) -> list[int]:
    """Number the keys in the order in which they first occur, from 0. Equal keys have the same number."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def conversation_numbers(rows: Sequence[TrainRow]) -> list[int]:
    """A number for each row: equal where one row's prompt begins with the whole prompt of the other, as that of a later
    turn does, or both begin with that of a third. Prompts with other first images are of other conversations."""
    first_images = _number_keys([row.images[:1] for row in rows])
    # The number of the first image stands before the tokens, so that prompts with other images share no beginning.
    prompt_of_row = [(image, *row.prompt_ids) for image, row in zip(first_images, rows, strict=True)]
    prompts = list(dict.fromkeys(prompt_of_row))
    order, common = sort_sequences(prompts)
    conversation_of: dict[tuple[int, ...], int] = {}
    # In sorted order a prompt comes after its beginnings. `beginnings` are the prompts that the present one begins
    # with, the shortest first, and the shortest names the conversation.
    beginnings: list[tuple[int, ...]] = []
    for index, shared in zip(order, common, strict=True):
        while beginnings and len(beginnings[-1]) > shared:
            beginnings.pop()
        beginnings.append(prompts[index])
        conversation_of[prompts[index]] = conversation_of.get(beginnings[0], len(conversation_of))
    return _number_keys([conversation_of[prompt] for prompt in prompt_of_row])


def passes_of_rank(
    rows: Sequence[TrainRow], indices: Sequence[int], budget: int, *, shared: bool, rank: int = 0, size: int = 1
) -> list[list[int]]:
    """The micro-batches that `rank` of `size` computes of `indices`; equally many on each rank, so the last ones may be
    empty."""
    parts = [micro_batches(rows, part, budget, shared) for part in rank_parts(rows, indices, size, shared)]
    most = max(map(len, parts))
    return parts[rank] + [[]] * (most - len(parts[rank]))


def rank_parts(rows: Sequence[TrainRow], indices: Sequence[int], size: int, shared: bool) -> list[list[int]]:
    """Split `indices` into `size` parts of which the largest has as few tokens to compute as can be.

    With `shared`, what rows of a part have in common counts once. With fewer rows than `size` some parts are empty.
    """
    if size == 1:
        return [list(indices)]
    sequences = [tokens_of(rows[index]) for index in indices]
    order, common = sort_sequences(sequences)
    lengths = np.asarray([len(sequences[place]) for place in order], np.int64)
    cuts = even_cuts(lengths, common if shared else np.zeros_like(common), size)
    return [[indices[place] for place in order[start:end]] for start, end in pairwise(cuts)]


def tokens_of(row: TrainRow) -> tuple[int, ...]:
    """The tokens that go through the model: the last one of a response predicts nothing."""
    return row.prompt_ids + row.response_ids[:-1]


def pass_tokens(rows: Sequence[TrainRow], shared: bool) -> int:
    """How many tokens a pass over these rows computes: with `shared` the distinct ones, else the padded ones."""
    sequences = [tokens_of(row) for row in rows]
    if not shared:
        return len(rows) * max(map(len, sequences), default=0)
    return sum(map(len, sequences)) - int(sort_sequences(sequences)[1].sum())


def micro_batches(rows: Sequence[TrainRow], indices: Sequence[int], budget: int, shared: bool) -> list[list[int]]:
    """Split `indices` into passes of at most `budget` tokens, as `PassPlan` does."""
    return PassPlan(rows, indices, shared).passes(budget)


class PassPlan:
    """Rows that go through the model in passes of any size: sorted once, and then cut quickly.

    With `shared`, rows go along their tree, and it is cut where least has to be computed again; what the rows of a
    pass have in common counts once. Else they are padded, and rows of like length go together.
    """

    def __init__(self, rows: Sequence[TrainRow], indices: Sequence[int], shared: bool) -> None:
        """Sort the rows at `indices` of `rows` once. `shared` says whether the model computes common beginnings only
        once."""
        sequences = [tokens_of(rows[index]) for index in indices]
        self._shared = shared
        if shared:
            order, self._common = sort_sequences(sequences)
        else:
            order = sorted(range(len(sequences)), key=lambda place: len(sequences[place]))
        self._indices = [indices[place] for place in order]
        self._lengths = np.asarray([len(sequences[place]) for place in order], np.int64)
        self._cuts_by_budget: dict[int, list[int]] = {}

    def passes(self, budget: int) -> list[list[int]]:
        """The rows of each pass of at most `budget` tokens. A row over the budget goes alone."""
        return [self._indices[start:end] for start, end in pairwise(self._cuts(budget))]

    def computed(self, budget: int) -> int:
        """How many tokens these passes compute."""
        cuts = self._cuts(budget)
        if self._shared:
            return distinct_tokens(self._lengths, self._common, cuts)
        return sum(int((end - start) * self._lengths[end - 1]) for start, end in pairwise(cuts))

    def _cuts(self, budget: int) -> list[int]:
        """Where each pass begins, and the number of rows. Each budget is asked for several times."""
        if budget not in self._cuts_by_budget:
            self._cuts_by_budget[budget] = self._find_cuts(budget)
        return self._cuts_by_budget[budget]

    def _find_cuts(self, budget: int) -> list[int]:
        """Cut the sorted rows into passes of at most `budget` tokens: the index of the first row of each pass, and the
        index after the last row."""
        if self._shared:
            return cuts_within(self._lengths, self._common, budget)
        cuts = [0]
        # Lengths rise, so the row at `place` is the longest of its pass, to which all its rows are padded.
        for place, length in enumerate(self._lengths.tolist()):
            if place > cuts[-1] and (place - cuts[-1] + 1) * length > budget:
                cuts.append(place)
        return [*cuts, len(self._indices)] if self._indices else [0]
