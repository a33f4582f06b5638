"""The keys and values of a running batch: one row per sequence. All rows end in the same column.

As the rows are aligned at their ends, a decode step writes one column of an allocated buffer, and a model sees rows
with left padding. Columns [first, end) are in use, and row i starts at column `starts[i]`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from cotune.integrations.models.device_copies import to_device

COLUMNS = 64
"""Columns are allocated in multiples of this number. After a move, at least half as many are free, so that moves are
rare."""


def columns_for(tokens: int) -> int:
    """The least number of columns of buffers for rows with up to `tokens` tokens."""
    return -(-(tokens + COLUMNS // 2) // COLUMNS) * COLUMNS


def buffer_tokens(rows: int, span: int) -> int:
    """The least number of tokens for which buffers have space when `rows` rows have reached a length of `span`."""
    return rows * columns_for(span)


class RowLayer(CacheLayerMixin):
    """Keys and values of one layer, shape [rows, heads, columns, head_dim].

    On a CPU, adjacent columns of the keys are adjacent in memory, which makes products with one query per row cheaper.
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
        """Allocate new buffers of zeros: masked values must be finite too."""
        rows = self.window.row_capacity
        columns = self.window.columns
        transposed = keys.new_zeros((rows, keys.shape[1], keys.shape[3], columns)).transpose(2, 3)
        self.keys = transposed if keys.device.type == "cpu" else transposed.contiguous()
        self.values = values.new_zeros((rows, values.shape[1], columns, values.shape[3]))

    def release(self) -> None:
        """Free the buffers. The next states allocate new ones."""
        self.keys = self.values = None
        self.is_initialized = False

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write one column of states [rows, heads, 1, head_dim], and return views of all columns in use."""
        return self.write(key_states.squeeze(2), value_states.squeeze(2))

    def write(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write one column of states [rows, heads, head_dim] of all live rows; see `update`."""
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
    """The part of the buffers that is in use. All layers share it."""

    def __init__(self) -> None:
        self.rows = 0
        self.row_capacity = 0
        self.columns = 0
        self.first = 0
        self.end = 0


class RowCache(Cache):
    """A `Cache` for decoding. Its rows can be added, removed and moved between steps.

    Buffers have spare rows and columns as long as rows times columns is at most `limit`. Above the limit, they have
    only the rows and columns that are needed. If `limit` is at least `buffer_tokens`, it is never exceeded.

    `starts` [capacity] is the first column of each row, `shifts` [capacity] is added to its positions, and `bias`
    [capacity, 1, 1, columns] is the additive mask.
    """

    def __init__(self, layers: int, dtype: torch.dtype, device: torch.device) -> None:
        """An empty cache of keys and values for sequences that are decoded together, for a model of so many layers.

        Rows are sequences, columns are tokens. `starts` has the first column of each row, and `bias` hides the columns
        before it from attention. `shifts` is added to the positions of a row's tokens, for models whose positions do
        not count tokens.
        """
        self.window = Window()
        super().__init__(layers=[RowLayer(self.window) for _ in range(layers)])
        self.dtype = dtype
        self.limit = math.inf
        self.starts = torch.zeros(0, dtype=torch.long, device=device)
        self.shifts = torch.zeros(0, dtype=torch.long, device=device)
        self.bias = torch.zeros((0, 1, 1, 0), dtype=dtype, device=device)

    @property
    def width(self) -> int:
        """The number of columns that the longest row uses."""
        return self.window.end - self.window.first

    def mask(self) -> Tensor:
        """Additive mask of the next step, [rows, 1, 1, width + 1]: 0 in the columns of a row, the lowest value before.

        Kernels of a GPU need aligned memory, which torch ensures only for odd strides, so the mask is copied there.
        """
        w = self.window
        mask = self.bias[: w.rows, :, :, w.first : w.end + 1]
        return mask if mask.device.type == "cpu" else mask.clone(memory_format=torch.contiguous_format)

    def positions(self) -> Tensor:
        """Position of the next token of each row, [rows, 1]."""
        w = self.window
        return (w.end - self.starts[: w.rows] + self.shifts[: w.rows]).unsqueeze(1)

    def token_bytes(self) -> int:
        """The number of bytes of one token's keys and values in one layer."""
        keys, values = self.layers[0].buffers()
        return int(keys.shape[1]) * int(keys.shape[3] + values.shape[3]) * int(keys.element_size())

    def gpu_memory(self) -> int:
        """The bytes of the GPU's memory that are free or belong to this cache."""
        device = self.bias.device
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + unused + self.nbytes)

    @property
    def nbytes(self) -> int:
        """The number of bytes of the buffers."""
        return sum(buffer.nbytes for layer in self.layers if layer.is_initialized for buffer in layer.buffers())

    def advance(self) -> None:
        """Begin the next column, after every layer has written this one."""
        self.window.end += 1

    @property
    def full(self) -> bool:
        """Whether no column is left to write."""
        return self.window.end >= self.window.columns

    def rearrange(
        self,
        live: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        rows: int,
        longest: int,
        width: int,
        span: int,
    ) -> None:
        """Move the rows that have not ended (`live`) to other rows, and make space for new rows, which `fill` writes.

        Afterwards there is a free column to write, and columns that only ended rows have used are no longer in use.

        Args:
            live: the numbers of the rows to keep, [live].
            positions: the numbers that they get, [live].
            rows: the number of rows afterwards, new ones included.
            longest: the number of tokens of the longest live row.
            width: the number of tokens of the longest prompt of the new rows; 0 without new rows.
            span: the most tokens that any row will reach.
        """
        window = self.window
        # All rows end in the same column, so the longest live row begins in the first column that is still needed.
        window.first = window.end - longest
        tokens = max(longest, width)
        row_capacity, columns = self._buffer_sizes(rows, tokens, span)
        if (row_capacity, columns) != (window.row_capacity, window.columns):
            self._replace_buffers(live, positions, row_capacity, columns, end=tokens)
        else:
            moved = positions != live
            self._move_rows(live[moved], positions[moved])
            has_space = tokens <= window.end < window.columns
            if not has_space:
                self._align_columns(rows, end=tokens)
        window.first = window.end - tokens
        window.rows = rows

    def release(self) -> None:
        """Free all buffers, when no row is in use."""
        w = self.window
        w.rows = w.row_capacity = w.columns = w.first = w.end = 0
        for layer in self.layers:
            layer.release()
        self.starts = self.starts[:0].clone()
        self.shifts = self.shifts[:0].clone()
        self.bias = self.bias[:0].clone()

    def _buffer_sizes(self, rows: int, tokens: int, span: int) -> tuple[int, int]:
        """The rows and columns of buffers for `rows` rows of `tokens` tokens, which grow up to `span` tokens.

        The present buffers are kept if they have enough space.
        """
        window = self.window
        row_capacity = window.row_capacity
        if rows > row_capacity:
            row_capacity = max(rows, 2 * window.row_capacity)
        # New buffers have space for half as many tokens more, so that growing rows are copied rarely. More than `span`
        # tokens are never needed.
        needed_columns = columns_for(tokens)
        spacious_columns = max(needed_columns, min(columns_for(tokens + tokens // 2), columns_for(span)))
        columns = window.columns
        has_free_columns = tokens + COLUMNS // 2 <= columns
        if not has_free_columns:
            columns = spacious_columns
        if row_capacity * columns <= self.limit:
            return row_capacity, columns
        # Close to the limit there are no spare rows, and only as many spare columns as the limit allows, in multiples
        # of COLUMNS.
        most_columns = int(self.limit // rows) // COLUMNS * COLUMNS
        columns = min(spacious_columns, most_columns)
        return rows, max(needed_columns, columns)

    def _replace_buffers(
        self,
        live: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        row_capacity: int,
        columns: int,
        end: int,
    ) -> None:
        """Allocate new buffers of `row_capacity` rows and `columns` columns, and copy the states of live rows to them.

        Row `live[i]` of the old buffers becomes row `positions[i]` of the new ones. The used columns then end at the
        column `end`.
        """
        window = self.window
        device = self.starts.device
        old_columns = slice(window.first, window.end)
        new_columns = slice(end - self.width, end)
        source = to_device(live, device)
        target = to_device(positions, device)
        # Usually the live rows are the first ones and stay there. Then a copy of a slice is enough.
        live_rows_are_first = np.array_equal(live, np.arange(len(live)))
        no_row_moves = live_rows_are_first and np.array_equal(live, positions)
        window.row_capacity = row_capacity
        window.columns = columns
        # Each old layer is freed before the next is copied, so that only one layer is in memory twice.
        for layer in self.layers:
            if not layer.is_initialized:
                continue
            old_buffers = layer.buffers()
            layer.allocate(*old_buffers)
            for buffer, states in zip(layer.buffers(), old_buffers, strict=True):
                if no_row_moves:
                    buffer[: len(live), :, new_columns] = states[: len(live), :, old_columns]
                else:
                    moved_states = states[:, :, old_columns].index_select(0, source)
                    buffer[:, :, new_columns].index_copy_(0, target, moved_states)
                    del moved_states
            del old_buffers, buffer, states

        # The values of each row, and the bias, which follows from the starts.
        starts = self.starts[source] + (end - window.end)
        shifts = self.shifts[source]
        self.starts = self.starts.new_zeros(row_capacity)
        self.shifts = self.shifts.new_zeros(row_capacity)
        self.starts[target] = starts
        self.shifts[target] = shifts
        self.bias = self.bias.new_zeros((row_capacity, 1, 1, columns))
        window.first = new_columns.start
        window.end = new_columns.stop
        self._write_bias(target)

    def _align_columns(self, rows: int, end: int) -> None:
        """Move the used columns of the first `rows` rows within the buffers, so that they end at the column `end`."""
        window = self.window
        old_columns = slice(window.first, window.end)
        new_columns = slice(end - self.width, end)
        for layer in self.layers:
            if layer.is_initialized:
                for buffer in layer.buffers():
                    # A copy first, because the old and the new columns may overlap.
                    buffer[:rows, :, new_columns] = buffer[:rows, :, old_columns].clone()
        self.starts[:rows] += end - window.end
        window.first = new_columns.start
        window.end = new_columns.stop
        self._write_bias(torch.arange(rows, device=self.starts.device))

    def fill(self, rows: Tensor, source: Cache, source_rows: Tensor, lengths: Tensor) -> None:
        """Copy prompts from the cache of a prefill into rows of this one. All tensors are [prompts].

        Prompt i has `lengths[i]` tokens. It is in row `source_rows[i]` of `source`, padded on the left, and is copied
        to row `rows[i]`.
        """
        end = self.window.end  # all rows end in the same column
        for layer, prefilled in zip(self.layers, source.layers, strict=True):
            if not layer.is_initialized:
                layer.lazy_initialization(prefilled.keys, prefilled.values)
            columns = slice(end - prefilled.keys.shape[2], end)
            for buffer, states in zip(layer.buffers(), (prefilled.keys, prefilled.values), strict=True):
                buffer[:, :, columns].index_copy_(0, rows, states.index_select(0, source_rows))
        self.starts[rows] = end - lengths
        self.shifts[rows] = 0
        self._write_bias(rows)

    def shift(self, rows: Tensor, by: Tensor) -> None:
        """Add `by` [rows] to the positions of all further tokens in these rows."""
        self.shifts[rows] = by

    def read(self, row: int, length: int, start: int, stop: int) -> list[Tensor]:
        """Copy keys and values of tokens [start, stop) of a row with `length` tokens, in the order of layers; each
        [heads, tokens, dim]."""
        first = self.window.end - length  # as in `starts`, which is on the device
        part = slice(first + start, first + stop)
        buffers = (buffer for layer in self.layers for buffer in layer.buffers())
        return [buffer[row, :, part].clone(memory_format=torch.contiguous_format) for buffer in buffers]

    def _move_rows(self, from_rows: npt.NDArray[np.int64], to_rows: npt.NDArray[np.int64]) -> None:
        """Copy `from_rows` to `to_rows` in the buffers, with their starts, shifts and biases. A row may be in both."""
        if not len(to_rows):
            return
        w = self.window
        device = self.starts.device
        source = to_device(from_rows, device)
        target = to_device(to_rows, device)
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
