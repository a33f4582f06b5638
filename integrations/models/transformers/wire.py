"""The settings that the in-process sampler's engine is started with, and its shares of memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

PREFIX_PART = 32
"""Keys and values of known prefixes may take the memory of the machine, or of the GPU, divided by this number."""
GPU_PART = 0.4
"""The share of a GPU's free memory that keys and values of the batch may take. Passes need memory too, and a learner
may be on the same GPU."""
DRAW_ELEMENTS = 1 << 25
"""The most logits that are drawn from at once, so that temporary tensors stay small for large vocabularies."""


class ModelSource(NamedTuple):
    """The model that the engine loads, and the limits of the engine."""

    model: Any
    """Folder or hub id, or a loaded model for an engine in a thread."""
    device: str | None = None
    """The device, "cpu" or "cuda"; None for a GPU if there is one, else the CPU."""
    dtype: str | None = None
    """The precision, by its name in torch. None is float32 on a CPU and bfloat16 on a GPU. On a CPU, bfloat16 is only
    the precision of matrix products."""
    threads: int | None = None
    """Threads on the CPU; None for torch's number, or one for a small model."""
    max_batch_rows: int = 1024
    """Most sequences that are decoded at once."""
    max_batch_tokens: int = 1 << 22
    """Most columns of keys and values, over all sequences."""
    tokenizer: Any = None
    end_token_ids: Sequence[int] | None = None
    """Tokens that end an answer; None for the tokens in the model's configuration."""
    prefix_cache: int | None = None
    """Bytes of keys and values of earlier prompts that are kept for prompts with the same beginning; 0 keeps none.
    None is 1 / PREFIX_PART of the memory of the machine, or of the GPU."""
