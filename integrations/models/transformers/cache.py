"""Key/value memory of a running batch: one row per sequence, all rows ending in the same column.

Rows are aligned at their ends, so one decode step writes one column of a preallocated buffer in place and a
model sees plain left padding. Columns [first, end) are in use; row i starts at column `starts[i]`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

COLUMNS = 64
"""Columns are allocated by so many. Half as many at least are free after a move, so that moves are rare."""


def columns_for(tokens: int) -> int:
    """Columns that buffers have at least for rows of up to so many tokens."""
    return -(-(tokens + COLUMNS // 2) // COLUMNS) * COLUMNS


def buffer_tokens(rows: int, span: int) -> int:
    """Tokens that the buffers hold at least once `rows` rows have reached a length of `span`."""
    return rows * columns_for(span)


class RowLayer(CacheLayerMixin):
    """Keys and values of one layer, shape [rows, heads, columns, head_dim].

    On CPU the memory of the keys runs along the columns, which makes products with one query per row cheaper.
    """

    is_sliding = False

    def __init__(self, window: Window) -> None:
        super().__init__()
        self.window = window

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for the shapes of these states, [any, heads, any, head_dim]."""
        self.allocate(key_states, value_states)
        self.is_initialized = True

    def allocate(self, keys: Tensor, values: Tensor) -> None:
        """New buffers of zeros, as what is masked must still be finite."""
        rows, columns = self.window.row_capacity, self.window.columns
        along = keys.new_zeros((rows, keys.shape[1], keys.shape[3], columns)).transpose(2, 3)
        self.keys = along if keys.device.type == "cpu" else along.contiguous()
        self.values = values.new_zeros((rows, values.shape[1], columns, values.shape[3]))

    def release(self) -> None:
        """Give the buffers back; the next states allocate others."""
        self.keys = self.values = None
        self.is_initialized = False

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write one column of states [rows, heads, 1, head_dim]; return views of all columns in use."""
        return self.write(key_states.squeeze(2), value_states.squeeze(2))

    def write(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The same for states [rows, heads, head_dim]: one column for every live row."""
        w = self.window
        self.keys[: w.rows, :, w.end] = key
        self.values[: w.rows, :, w.end] = value
        return self.keys[: w.rows, :, w.first : w.end + 1], self.values[: w.rows, :, w.first : w.end + 1]

    def buffers(self) -> tuple[Tensor, Tensor]:
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.window.end - self.window.first + query_length, 0

    def get_seq_length(self) -> int:
        return self.window.end - self.window.first

    def get_max_length(self) -> int:
        return -1


class Window:
    """Which part of the buffers is in use, shared by all layers."""

    def __init__(self) -> None:
        self.rows = 0
        self.row_capacity = 0
        self.columns = 0
        self.first = 0
        self.end = 0


class RowCache(Cache):
    """A `Cache` for decoding whose rows come, go and move between steps.

    Buffers grow ahead of need as long as they hold at most `limit` tokens, rows times columns; beyond it they have the
    rows and columns that are needed. So with `limit` at `buffer_tokens` or more they never hold more than that.

    `starts` [capacity] is the first column of each row, `shifts` [capacity] what is added to its positions, `bias`
    [capacity, 1, 1, columns] the additive mask.
    """

    def __init__(self, layers: int, dtype: torch.dtype, device: torch.device) -> None:
        self.window = Window()
        super().__init__(layers=[RowLayer(self.window) for _ in range(layers)])
        self.dtype = dtype
        self.limit = math.inf
        self.starts = torch.zeros(0, dtype=torch.long, device=device)
        self.shifts = torch.zeros(0, dtype=torch.long, device=device)
        self.bias = torch.zeros((0, 1, 1, 0), dtype=dtype, device=device)

    @property
    def width(self) -> int:
        """Columns in use by the longest row."""
        return self.window.end - self.window.first

    def mask(self) -> Tensor:
        """Additive mask of the next step, [rows, 1, 1, width + 1]: 0 where a row has content, else the lowest value.

        A GPU's kernels want its memory to begin at an even address, which torch sees to only where strides are odd.
        """
        w = self.window
        mask = self.bias[: w.rows, :, :, w.first : w.end + 1]
        return mask if mask.device.type == "cpu" else mask.clone(memory_format=torch.contiguous_format)

    def positions(self) -> Tensor:
        """Position of the next token of each row, [rows, 1]."""
        w = self.window
        return (w.end - self.starts[: w.rows] + self.shifts[: w.rows]).unsqueeze(1)

    def token_bytes(self) -> int:
        """What the keys and values of one token take in one layer."""
        keys, values = self.layers[0].buffers()
        return int(keys.shape[1]) * int(keys.shape[3] + values.shape[3]) * int(keys.element_size())

    def gpu_memory(self) -> int:
        """Bytes of the GPU that are free, or that this cache has already."""
        device = self.bias.device
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + unused + self.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.nbytes for layer in self.layers if layer.is_initialized for buffer in layer.buffers())

    def advance(self) -> None:
        """Call after each step, when every layer has written its column."""
        self.window.end += 1

    @property
    def full(self) -> bool:
        """Whether no column is left to write."""
        return self.window.end >= self.window.columns

    def rearrange(
        self, live: npt.NDArray[np.int64], to: npt.NDArray[np.int64], rows: int, longest: int, width: int, span: int
    ) -> None:
        """Rows `live` become rows `to` of `rows` in all; the others may be filled with prompts of up to `width` tokens.

        The longest live row has `longest` tokens, and no row will have more than `span`. There is a column to write
        then, and columns that only ended rows used are left out.
        """
        w = self.window
        w.first = w.end - longest
        tokens = max(longest, width)
        row_capacity, columns = self._sizes(rows, tokens, span)
        if (row_capacity, columns) != (w.row_capacity, w.columns):
            self._replace(live, to, row_capacity, columns, tokens)
        else:
            moved = to != live
            self._move(live[moved], to[moved])
            if not tokens <= w.end < w.columns:
                self._align(rows, tokens)
        w.first = w.end - tokens
        w.rows = rows

    def release(self) -> None:
        """Give all buffers back. No row is in use."""
        w = self.window
        w.rows = w.row_capacity = w.columns = w.first = w.end = 0
        for layer in self.layers:
            layer.release()
        self.starts, self.shifts, self.bias = self.starts[:0].clone(), self.shifts[:0].clone(), self.bias[:0].clone()

    def _sizes(self, rows: int, tokens: int, span: int) -> tuple[int, int]:
        """Rows and columns of the buffers for `rows` rows of `tokens` tokens, which grow to `span` at most."""
        w = self.window
        least = columns_for(tokens)
        ahead = max(least, min(columns_for(tokens + tokens // 2), columns_for(span)))
        row_capacity = w.row_capacity if rows <= w.row_capacity else max(rows, 2 * w.row_capacity)
        columns = w.columns if tokens + COLUMNS // 2 <= w.columns else ahead
        if row_capacity * columns <= self.limit:
            return row_capacity, columns
        # Close to the limit: no spare rows, and spare columns as far as it allows.
        most = int(self.limit // rows) // COLUMNS * COLUMNS
        return rows, max(least, min(ahead, most))

    def _replace(
        self, live: npt.NDArray[np.int64], to: npt.NDArray[np.int64], row_capacity: int, columns: int, end: int
    ) -> None:
        """Copy the columns in use of rows `live` to rows `to` of new buffers, so that they end at `end`."""
        w, device = self.window, self.starts.device
        old, new = slice(w.first, w.end), slice(end - self.width, end)
        source, target = torch.as_tensor(live, device=device), torch.as_tensor(to, device=device)
        stays = np.array_equal(live, to) and np.array_equal(live, np.arange(len(live)))
        w.row_capacity, w.columns = row_capacity, columns
        # Layer by layer, so that the memory of one old layer at most is held beside the new one.
        for layer in self.layers:
            if not layer.is_initialized:
                continue
            before = layer.buffers()
            layer.allocate(*before)
            for buffer, states in zip(layer.buffers(), before, strict=True):
                if stays:
                    buffer[: len(live), :, new] = states[: len(live), :, old]
                else:
                    buffer[:, :, new].index_copy_(0, target, states[:, :, old].index_select(0, source))
            del before, buffer, states
        starts, shifts = self.starts[source] + (end - w.end), self.shifts[source]
        self.starts, self.shifts = self.starts.new_zeros(row_capacity), self.shifts.new_zeros(row_capacity)
        self.starts[target], self.shifts[target] = starts, shifts
        self.bias = self.bias.new_zeros((row_capacity, 1, 1, columns))
        w.first, w.end = new.start, new.stop
        self._write_bias(target)

    def _align(self, rows: int, end: int) -> None:
        """Move the columns in use within the buffers so that they end at `end`."""
        w = self.window
        old, new = slice(w.first, w.end), slice(end - self.width, end)
        for layer in self.layers:
            if layer.is_initialized:
                for buffer in layer.buffers():
                    buffer[:rows, :, new] = buffer[:rows, :, old].clone()
        self.starts[:rows] += end - w.end
        w.first, w.end = new.start, new.stop
        self._write_bias(torch.arange(rows, device=self.starts.device))

    def fill(self, rows: Tensor, source: Cache, source_rows: Tensor, lengths: Tensor) -> None:
        """Copy prompts into `rows`: row `source_rows[i]` of a left-padded prefill, `lengths[i]` tokens of it."""
        w = self.window
        for layer, prefilled in zip(self.layers, source.layers, strict=True):
            if not layer.is_initialized:
                layer.lazy_initialization(prefilled.keys, prefilled.values)
            columns = slice(w.end - prefilled.keys.shape[2], w.end)
            for buffer, prompt in zip(layer.buffers(), (prefilled.keys, prefilled.values), strict=True):
                buffer[:, :, columns].index_copy_(0, rows, prompt.index_select(0, source_rows))
        self.starts[rows] = w.end - lengths
        self.shifts[rows] = 0
        self._write_bias(rows)

    def shift(self, rows: Tensor, by: Tensor) -> None:
        """Add to the positions of what follows in these rows, `by` [rows]."""
        self.shifts[rows] = by

    def read(self, row: int, start: int, stop: int) -> list[Tensor]:
        """Copies of keys and values, layer by layer, of tokens [start, stop) of a row; each [heads, tokens, dim]."""
        first = int(self.starts[row])
        part = slice(first + start, first + stop)
        buffers = (buffer for layer in self.layers for buffer in layer.buffers())
        return [buffer[row, :, part].clone(memory_format=torch.contiguous_format) for buffer in buffers]

    def _move(self, live: npt.NDArray[np.int64], to: npt.NDArray[np.int64]) -> None:
        """Copy rows `live` to rows `to`, which may overlap, within the buffers."""
        if not len(to):
            return
        w, device = self.window, self.starts.device
        source, target = torch.as_tensor(live, device=device), torch.as_tensor(to, device=device)
        for layer in self.layers:
            if layer.is_initialized:
                for buffer in layer.buffers():
                    used = buffer[:, :, w.first : w.end]
                    used.index_copy_(0, target, used.index_select(0, source))
        self.starts[target] = self.starts[source]
        self.shifts[target] = self.shifts[source]
        self.bias[target] = self.bias[source]

    def _write_bias(self, rows: Tensor) -> None:
        columns = torch.arange(self.window.columns, device=rows.device)
        hidden = columns[None] < self.starts[rows][:, None]
        bias = torch.zeros(hidden.shape, dtype=self.dtype, device=rows.device)
        bias.masked_fill_(hidden, torch.finfo(self.dtype).min)
        self.bias[rows] = bias[:, None, None]


def attention_only(config: Any) -> bool:
    """Whether every layer of such a model keeps keys and values of all or of the last tokens, and nothing else."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if not kinds <= {"full_attention", "sliding_attention"}:
        return False
    return all(isinstance(layer, DynamicLayer) for layer in DynamicCache(config=config).layers)
