"""What the in-process sampler's engine is started with."""

from __future__ import annotations

from typing import Any, NamedTuple

PREFIX_PART = 32
"""The memory of the machine, or of the GPU, over this is what keys and values of known prefixes may take."""


class ModelSource(NamedTuple):
    """What the engine loads and its limits; see `TransformersSampler.open`. `model` may be a loaded model."""

    model: Any
    device: str | None
    dtype: str | None
    threads: int | None
    max_batch_rows: int
    max_batch_tokens: int
    tokenizer: Any
    end_token_ids: tuple[int, ...] | None
    prefix_cache: int | None = None
