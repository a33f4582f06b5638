"""Prefill of prompts whose beginnings may be known: the division of prompts into passes, and the pass itself."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor
from transformers.cache_utils import DynamicCache

from cotune.integrations.models.device_copies import to_device
from cotune.integrations.models.transformers.prefixes import Ids, Prefix, States, common_length

LEAST_SAVED_TOKENS = 256
"""The number of tokens that a pass over a common beginning must save, as each pass reads all weights once more."""


def group_by_length(unknown_tokens: Sequence[int]) -> list[list[int]]:
    """Divide prompts into passes, by their numbers of unknown tokens. Returns the numbers of the prompts of each pass.

    All prompts of a pass are padded to the longest one. So that padding stays cheap, the longest has at most twice the
    unknown tokens of the shortest, plus 32.
    """
    passes: list[list[int]] = []
    shortest = 0
    for number in sorted(range(len(unknown_tokens)), key=lambda number: unknown_tokens[number]):
        if not passes or unknown_tokens[number] > 2 * shortest + 32:
            passes.append([])
            shortest = unknown_tokens[number]
        passes[-1].append(number)
    return passes


def find_shared_stems(prompts: Sequence[Ids], known: Sequence[int]) -> list[Ids]:
    """Find the stems of distinct prompts: common beginnings of several prompts that are worth a pass of their own.

    `known[i]` is the number of tokens of prompt i whose states are known already. No stem is the beginning of another
    stem. A longer beginning that fewer prompts share is found by the next call, when these stems are known.
    """
    # Sorted prompts with a common beginning are neighbours. `shared[i]` is the number of tokens that the i-th prompt in
    # this order shares with the next one.
    order = sorted(range(len(prompts)), key=lambda number: prompts[number])
    shared = [common_length(prompts[left], prompts[right]) for left, right in pairwise(order)]
    stems = []
    ranges = [(0, len(order))]  # of neighbours that may share a stem
    while ranges:
        low, high = ranges.pop()
        if high - low < 2:
            continue
        # All prompts of the range share as many tokens as the two neighbours that share the fewest.
        split = min(range(low, high - 1), key=lambda position: shared[position])
        shared_by_all = shared[split]
        first_prompt = order[low]
        # A stem is computed once, instead of once for each prompt.
        n_prompts = high - low
        saved_tokens = (n_prompts - 1) * (shared_by_all - known[first_prompt])
        if saved_tokens >= LEAST_SAVED_TOKENS:
            stems.append(prompts[first_prompt][:shared_by_all])
        else:
            # Look for longer stems on both sides of these two neighbours.
            ranges += [(low, split + 1), (split + 1, high)]
    return stems


def states_of(cache: DynamicCache, row: int, length: int, start: int, stop: int) -> States:
    """Copy the states of tokens [start, stop) of a prompt with `length` tokens from the cache of its pass."""
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    first = tensors[0].shape[2] - length
    return [tensor[row, :, first + start : first + stop].clone() for tensor in tensors]


def prefill(
    model: Any, prompts: Sequence[Ids], known: Sequence[Prefix], image_inputs: Mapping[str, Any] | None = None
) -> tuple[DynamicCache, Tensor]:
    """Compute the tokens of prompts after their known prefixes, in one pass.

    Returns their keys and values, padded on the left, and the next logits, [prompts, vocabulary].

    All rows compute the same number of tokens, so that there is no gap between known and new tokens. A row with fewer
    unknown tokens than another one therefore computes some of its known tokens again. `image_inputs` has the images of
    prompts of one length, and the model then computes the positions.
    """
    n_computed = max(len(prompt) - prefix.length for prompt, prefix in zip(prompts, known, strict=True))
    reused = [max(0, len(prompt) - n_computed) for prompt in prompts]
    past = max(reused)
    width = past + n_computed
    # Padded on the left: the tokens to compute, and whether a column belongs to the prompt.
    ids = np.zeros((len(prompts), n_computed), np.int64)
    mask = np.zeros((len(prompts), width), np.int64)
    for row, prompt in enumerate(prompts):
        new_ids = prompt[reused[row] :]
        ids[row, n_computed - len(new_ids) :] = new_ids
        mask[row, width - len(prompt) :] = 1
    cache = DynamicCache()
    if past:
        states = join_states(known, reused)
        for layer, (keys, values) in enumerate(zip(states[::2], states[1::2], strict=True)):
            cache.update(keys, values, layer)
    inputs: Mapping[str, Any]
    if image_inputs is not None:
        inputs = image_inputs
    else:
        positions = (mask.cumsum(1) - 1).clip(0)[:, past:]  # [prompts, n_computed]
        inputs = {"position_ids": to_device(positions, model.device)}
    out = model(
        input_ids=to_device(ids, model.device),
        attention_mask=None if mask.all() else to_device(mask, model.device),
        **inputs,
        **{cache_argument(model): cache},
        use_cache=True,
        logits_to_keep=1,
    )
    return cache, out.logits[:, -1]


def cache_argument(model: Any) -> str:
    """The name under which the model's forward pass takes its cache. transformers 5.24 renamed it to `cache`; earlier
    versions, and models whose code lies in their own folder, call it `past_key_values`."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def image_shift(model: Any) -> Tensor | None:
    """The difference between the next position and the number of tokens, for each prompt of the last prefill [prompts].
    Models whose positions are the rows and columns of an image use fewer positions than tokens. None for others."""
    shift = getattr(model.base_model, "rope_deltas", None)
    return None if shift is None else shift.flatten()


def join_states(prefixes: Sequence[Prefix], lengths: Sequence[int]) -> States:
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
