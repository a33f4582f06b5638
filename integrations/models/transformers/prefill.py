"""Prefill of prompts whose beginnings may be known: the division of prompts into passes, and the pass itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from cotune.integrations.models.transformers.prefixes import Ids, Prefix, States, common

WORTH = 256
"""The number of tokens that a pass over a common beginning must save, as each pass reads all weights once more."""


def like_lengths(rest: Sequence[int]) -> list[list[int]]:
    """Divide the prompts, given by their numbers of unknown tokens, into passes. No pass pads a prompt to more than
    twice its unknown tokens plus 32."""
    groups: list[list[int]] = []
    for number in sorted(range(len(rest)), key=rest.__getitem__):
        if not groups or rest[number] > 2 * rest[groups[-1][0]] + 32:
            groups.append([])
        groups[-1].append(number)
    return groups


def stems(prompts: Sequence[Ids], known: Sequence[int]) -> list[Ids]:
    """Find common beginnings of several distinct prompts that are worth a pass of their own.

    Of prompt i, `known[i]` tokens are already known. No stem is the beginning of another stem. A longer beginning that
    fewer prompts have in common is found in the next call, when these stems are known.
    """
    order = sorted(range(len(prompts)), key=prompts.__getitem__)
    shared = [common(prompts[left], prompts[right]) for left, right in pairwise(order)]
    shared_stems, runs = [], [(0, len(order))]
    while runs:
        low, high = runs.pop()
        if high - low < 2:
            continue
        # The pair with the least in common shows how much all prompts of the run have in common.
        split = min(range(low, high - 1), key=shared.__getitem__)
        first = order[low]
        if (high - low - 1) * (shared[split] - known[first]) >= WORTH:
            shared_stems.append(prompts[first][: shared[split]])
        else:
            runs += [(low, split + 1), (split + 1, high)]
    return shared_stems


def states_of(cache: DynamicCache, row: int, length: int, start: int, stop: int) -> States:
    """Copy the states of tokens [start, stop) of a prompt with `length` tokens from the cache of its pass."""
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    first = tensors[0].shape[2] - length
    return [tensor[row, :, first + start : first + stop].clone() for tensor in tensors]


def prefill(
    model: Any, prompts: Sequence[Ids], known: Sequence[Prefix], seen: Mapping[str, Any] | None = None
) -> tuple[DynamicCache, Tensor]:
    """Compute the unknown tokens of prompts in one pass. Returns their cache, padded on the left, and the next logits.

    All rows compute the same number of tokens, so that there is no gap between known and new tokens. `seen` has the
    images of prompts of one length, whose positions the model may compute differently.
    """
    longest = max(len(prompt) - prefix.length for prompt, prefix in zip(prompts, known, strict=True))
    reused = [max(0, len(prompt) - longest) for prompt in prompts]
    past, width = max(reused), max(reused) + longest
    ids = np.zeros((len(prompts), longest), np.int64)
    mask = np.zeros((len(prompts), width), np.int64)
    for row, (prompt, start) in enumerate(zip(prompts, reused, strict=True)):
        ids[row, longest - len(prompt) + start :] = prompt[start:]
        mask[row, width - len(prompt) :] = 1
    cache = DynamicCache()
    if past:
        states = joined(known, reused)
        for layer, (keys, values) in enumerate(zip(states[::2], states[1::2], strict=True)):
            cache.update(keys, values, layer)
    positions = torch.as_tensor((mask.cumsum(1) - 1).clip(0)[:, past:], device=model.device)
    out = model(
        input_ids=torch.as_tensor(ids, device=model.device),
        attention_mask=None if mask.all() else torch.as_tensor(mask, device=model.device),
        **({"position_ids": positions} if seen is None else seen),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return cache, out.logits[:, -1]


def image_shift(model: Any) -> Tensor | None:
    """The difference between the next position and the number of tokens, for each prompt of the last prefill [prompts].
    Models whose positions are the rows and columns of an image use fewer positions than tokens. None for others."""
    shift = getattr(model.base_model, "rope_deltas", None)
    return None if shift is None else shift.flatten()


def joined(prefixes: Sequence[Prefix], lengths: Sequence[int]) -> States:
    """Put the states of the first `lengths[i]` tokens of each prefix into one tensor [rows, heads, longest, width].

    Shorter rows begin with zeros, so that the last token of each row is in the last column. At least one length must be
    above 0.
    """
    width = max(lengths)
    first_part = next(prefix for prefix in prefixes if prefix.length).parts[0]
    joined_states = [state.new_zeros((len(prefixes), state.shape[0], width, state.shape[2])) for state in first_part]
    for row, (prefix, length) in enumerate(zip(prefixes, lengths, strict=True)):
        start = width - length
        # A part has the states of the tokens that a prefix adds to the one before it. Beyond `length` parts are empty.
        for part in prefix.parts:
            stop = min(start + part[0].shape[1], width)
            for target, state in zip(joined_states, part, strict=True):
                target[row, :, start:stop] = state[:, : stop - start]
            start = stop
    return joined_states
