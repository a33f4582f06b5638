"""Attention of one decode step on the CPU. The keys and values of a prompt are read once for all its candidates."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "cotune_rows"
_IGNORED_OPTIONS = {"dropout", "scaling", "sliding_window", "is_causal", "position_ids", "use_cache"}
"""Options of the model library that do not change the attention of one new token under its mask."""
WORTH = 2 << 20
"""The bytes of keys and values that a group must save per layer. To read so many takes about as long as the
additional products of a group."""


class SharedColumns(NamedTuple):
    """Groups of rows with equal keys and values in all columns before `columns`, as the candidates of one prompt have.

    A group is its first row and the row after its last. The groups cover all rows in order.
    """

    columns: int
    groups: Sequence[tuple[int, int]]


def runs(values: npt.NDArray[Any]) -> list[tuple[int, int]]:
    """The start and end of each run of equal values."""
    edges = np.flatnonzero(values[1:] != values[:-1]) + 1
    return list(pairwise([0, *edges.tolist(), len(values)]))


def find_shared_columns(columns: int, groups: Sequence[tuple[int, int]], token_bytes: int) -> SharedColumns | None:
    """The shared columns of these groups; None if they would make the step slower.

    A token takes `token_bytes` per layer.
    """
    rows = groups[-1][1]
    # Each group reads its columns once, instead of once for each of its rows.
    saved_bytes = (rows - len(groups)) * columns * token_bytes
    if saved_bytes <= 0 or saved_bytes < len(groups) * WORTH:
        return None
    return SharedColumns(columns, groups)


def rows_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    shared_columns: SharedColumns | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of the model library's interface, for one new token per row.

    Takes query [rows, heads, 1, head_dim], key and value [rows, key heads, columns, head_dim], and an additive mask
    [rows, 1, 1, columns]. Returns [rows, 1, heads, head_dim].

    It takes two batched matrix products, which are faster on a CPU than the general kernel, and more products if rows
    have `shared_columns`. The model library's function computes all other cases: prefill, boolean masks, options of
    other models.
    """
    rows, heads, length, dim = query.shape
    key_heads = key.shape[1]
    has_other_options = any(v is not None for k, v in kwargs.items() if k not in _IGNORED_OPTIONS)
    if (
        length != 1
        or has_other_options
        or attention_mask is None
        or not attention_mask.is_floating_point()
        or attention_mask.shape[1] != 1
    ):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    # Several heads of the query read the keys of one head.
    grouped_query = query.view(rows, key_heads, heads // key_heads, dim)
    mask = attention_mask.expand(*grouped_query.shape[:3], -1).flatten(0, 1)
    scale = dim**-0.5 if scaling is None else scaling
    out = attend(grouped_query, key, value, mask, scale, shared_columns)
    return out.view(rows, 1, heads, value.shape[3]), None


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, shared_columns: SharedColumns | None
) -> Tensor:
    """Attention softmax(scaling * query key^T + mask) value, for one new token per row.

    With grouped-query attention, several heads of the query read the same head of keys and values: they are a group,
    and "queries" are the heads in a group. `query` is [rows, groups, queries, width], `key` and `value` are [rows,
    groups, columns, width]. The additive mask is [rows x groups, queries, columns]. Returns [rows, groups, queries,
    width of the values].
    """
    shape = query.shape[:3]
    if shared_columns is not None:
        return _attend_shared(query * scaling, key, value, mask.view(*shape, -1), shared_columns)
    scores = torch.baddbmm(mask, query.flatten(0, 1), key.flatten(0, 1).transpose(1, 2), alpha=scaling)
    output = torch.bmm(torch.softmax(scores, -1), value.flatten(0, 1))
    return output.view(*shape, value.shape[3])


def _attend_shared(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, shared_columns: SharedColumns) -> Tensor:
    """Attention if neighbouring rows share the keys and values of their first columns. `shared_columns.groups` are
    ranges [low, high) of rows, which together are all rows.

    The shared part is one product for each of these ranges instead of one for each row. Shapes are as in `attend`, but
    the mask is [rows, groups, queries, columns], and `query` is scaled already.
    """
    n_shared = shared_columns.columns
    # Scores of the columns that each row has for itself, then of the shared columns, [rows, groups, queries, columns].
    scores = query.new_empty((*query.shape[:3], key.shape[2]))
    scores[..., n_shared:] = torch.matmul(query, key[:, :, n_shared:].transpose(2, 3))
    for low, high in shared_columns.groups:
        # All queries of the range, as if they belonged to one row, with the keys of its first row.
        shared_keys = key[low, :, :n_shared]
        product = torch.matmul(_join_queries(query[low:high]), shared_keys.transpose(1, 2))
        scores[low:high, ..., :n_shared] = _split_queries(product, high - low)
    weights = torch.softmax(scores.add_(mask), -1)
    # The same two parts for the sums of values.
    out = torch.matmul(weights[..., n_shared:], value[:, :, n_shared:])
    for low, high in shared_columns.groups:
        shared_values = value[low, :, :n_shared]
        product = torch.matmul(_join_queries(weights[low:high, ..., :n_shared]), shared_values)
        out[low:high] += _split_queries(product, high - low)
    return out


def _join_queries(rows: Tensor) -> Tensor:
    """Change the shape [rows, groups, queries, n] to [groups, rows x queries, n]."""
    return rows.transpose(0, 1).flatten(1, 2)


def _split_queries(joined: Tensor, rows: int) -> Tensor:
    """Change the shape [groups, rows x queries, n] back to [rows, groups, queries, n]."""
    return joined.unflatten(1, (rows, -1)).transpose(0, 1)


def use_rows_attention(model: Any) -> bool:
    """Switch a model on a CPU from the general kernel to `rows_attention`. Returns whether the model uses it now."""
    if model.config._attn_implementation == ATTENTION:
        return True
    if model.device.type != "cpu" or model.config._attn_implementation != "sdpa":
        return False
    AttentionInterface.register(ATTENTION, rows_attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    model.set_attn_implementation(ATTENTION)
    return True
