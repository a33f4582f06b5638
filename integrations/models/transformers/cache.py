"""Key/value memory of a running batch: one row per sequence, all rows ending in the same column.

Rows are aligned at their ends, so one decode step writes one column of a preallocated buffer in place and a
model sees plain left padding. Columns [first, end) are in use; row i starts at column `starts[i]`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

HEADROOM = 64
"""Free columns made at least when a buffer is (re)placed, so that moving it is rare."""


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

    `starts` [capacity] is the first column of each row, `shifts` [capacity] what is added to its positions, `bias`
    [capacity, 1, 1, columns] the additive mask.
    """

    def __init__(self, layers: int, dtype: torch.dtype, device: torch.device) -> None:
        self.window = Window()
        super().__init__(layers=[RowLayer(self.window) for _ in range(layers)])
        self.dtype = dtype
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
        own = sum(buffer.nbytes for layer in self.layers if layer.is_initialized for buffer in layer.buffers())
        return int(torch.cuda.mem_get_info(device)[0] + unused + own)

    def advance(self) -> None:
        """Call after each step, when every layer has written its column."""
        self.window.end += 1

    def make_room(self, rows: int, width: int) -> None:
        """Let `rows` rows in all fit, each with up to `width` tokens before `end`, and a column to write."""
        w = self.window
        if w.rows == 0:
            w.first = w.end
        if rows <= w.row_capacity and width <= w.end < w.columns:
            return
        end = max(w.end - w.first, width)
        row_capacity = w.row_capacity if rows <= w.row_capacity else max(rows, 2 * w.row_capacity)
        columns = w.columns if end + HEADROOM // 2 <= w.columns else end + max(HEADROOM, end // 2)
        self._place(row_capacity, columns, end)

    def _place(self, row_capacity: int, columns: int, end: int) -> None:
        """Move the columns in use so that they end at `end`, into larger buffers where these have another size."""
        w = self.window
        live, old, new = slice(0, w.rows), slice(w.first, w.end), slice(end - self.width, end)
        larger = (row_capacity, columns) != (w.row_capacity, w.columns)
        w.row_capacity, w.columns = row_capacity, columns
        for layer in self.layers:
            if layer.is_initialized:
                before = layer.buffers()
                if larger:
                    layer.allocate(*before)
                for buffer, source in zip(layer.buffers(), before, strict=True):
                    states = source[live, :, old]
                    buffer[live, :, new] = states if larger else states.clone()
        if larger:
            spare = self.starts.new_zeros(row_capacity - len(self.starts))
            self.starts, self.shifts = torch.cat([self.starts, spare]), torch.cat([self.shifts, spare])
            self.bias = self.bias.new_zeros((row_capacity, 1, 1, columns))
        self.starts[live] += end - w.end
        w.first, w.end = new.start, new.stop
        self._write_bias(torch.arange(w.rows, device=self.starts.device))

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

    def move(self, to: Tensor, source: Tensor, rows: int) -> None:
        """Copy rows `source` to rows `to` (any overlap), after which the first `rows` rows are in use."""
        w = self.window
        if len(to):
            for layer in self.layers:
                for buffer in layer.buffers():
                    used = buffer[:, :, w.first : w.end]
                    used.index_copy_(0, to, used.index_select(0, source))
            self.starts[to] = self.starts[source]
            self.shifts[to] = self.shifts[source]
            self.bias[to] = self.bias[source]
        w.rows = rows

    def trim(self) -> None:
        """Leave out the leading columns that no row uses any more."""
        w = self.window
        w.first = int(self.starts[: w.rows].min()) if w.rows else w.end

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
