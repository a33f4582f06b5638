"""Prefill of prompts whose beginnings may be known: which go together, and the pass that computes the rest."""

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
"""Tokens that a pass over what several prompts begin with must save, as it reads all weights once more."""


def like_lengths(rest: Sequence[int]) -> list[list[int]]:
    """Numbers of the prompts, by passes: in none is one padded to more than twice what it has to compute, and 32."""
    groups: list[list[int]] = []
    for number in sorted(range(len(rest)), key=rest.__getitem__):
        if not groups or rest[number] > 2 * rest[groups[-1][0]] + 32:
            groups.append([])
        groups[-1].append(number)
    return groups


def stems(prompts: Sequence[Ids], known: Sequence[int]) -> list[Ids]:
    """What several of these distinct prompts begin with, where computing it once saves enough.

    Of prompt i `known[i]` tokens are known already. No stem is a part of another: what fewer prompts have in common is
    found once these are known.
    """
    order = sorted(range(len(prompts)), key=prompts.__getitem__)
    shared = [common(prompts[one], prompts[other]) for one, other in pairwise(order)]
    shared_stems, runs = [], [(0, len(order))]
    while runs:
        low, high = runs.pop()
        if high - low < 2:
            continue
        at = min(range(low, high - 1), key=shared.__getitem__)
        first = order[low]
        if (high - low - 1) * (shared[at] - known[first]) >= WORTH:
            shared_stems.append(prompts[first][: shared[at]])
        else:
            runs += [(low, at + 1), (at + 1, high)]
    return shared_stems


def states_of(cache: DynamicCache, row: int, length: int, start: int, stop: int) -> States:
    """Copies of the states of tokens [start, stop) of a prompt of `length` tokens, from the pass over it."""
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    first = tensors[0].shape[2] - length
    return [tensor[row, :, first + start : first + stop].clone() for tensor in tensors]


def prefill(
    model: Any, prompts: Sequence[Ids], known: Sequence[Prefix], seen: Mapping[str, Any] | None = None
) -> tuple[DynamicCache, Tensor]:
    """One pass over what is not known of the prompts: their cache, padded on the left, and the logits that follow.

    All rows compute as many tokens, so that what was known and what is new have no gap between them. `seen` are the
    images of prompts of one length, for which the model may have positions of its own.
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
    """[prompts] how far the positions after each of the prompts that were just prefilled are from their number: models
    that give the rows and columns of an image positions of their own use fewer than it has tokens. None for others."""
    shift = getattr(model.base_model, "rope_deltas", None)
    return None if shift is None else shift.flatten()


def joined(prefixes: Sequence[Prefix], lengths: Sequence[int]) -> States:
    """States [rows, heads, longest, width] of the first `lengths[i]` tokens of each prefix, which end in the last
    column; zeros before. At least one length is above 0."""
    width = max(lengths)
    some = next(prefix for prefix in prefixes if prefix.length).parts[0]
    states_out = [state.new_zeros((len(prefixes), state.shape[0], width, state.shape[2])) for state in some]
    for row, (prefix, length) in enumerate(zip(prefixes, lengths, strict=True)):
        at = width - length
        for part in prefix.parts:
            taken = min(part[0].shape[1], width - at)
            for states, own in zip(states_out, part, strict=True):
                states[row, :, at : at + taken] = own[:, :taken]
            at += taken
    return states_out
