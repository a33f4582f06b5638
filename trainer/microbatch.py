"""Which rows make an optimizer step, and which of them go through the model together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from cotune.samples import TrainRow


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
