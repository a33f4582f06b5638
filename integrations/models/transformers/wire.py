"""What the in-process sampler's engine is started with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

PREFIX_PART = 32
"""The memory of the machine, or of the GPU, over this is what keys and values of known prefixes may take."""
GPU_PART = 0.4
"""Of what is free on a GPU, what keys and values may take: passes want room too, and a learner may be on the same
GPU."""
DRAW_ELEMENTS = 1 << 25
"""Logits drawn from at a time, so that temporaries stay small at large vocabularies."""


class ModelSource(NamedTuple):
    """What the engine loads, and its limits."""

    model: Any
    """Folder or hub id, or a loaded model for an engine in a thread."""
    device: str | None = None
    """Where it runs, "cpu" or "cuda"; None: on a GPU if there is one."""
    dtype: str | None = None
    """A torch name; None: float32 on a CPU, bfloat16 on a GPU. On a CPU, bfloat16 is only the precision of products."""
    threads: int | None = None
    """Threads on the CPU. None: torch's number, or one for a small model."""
    max_batch_rows: int = 1024
    """Most sequences that are decoded at once."""
    max_batch_tokens: int = 1 << 22
    """Most key/value columns of all of them."""
    tokenizer: Any = None
    end_token_ids: Sequence[int] | None = None
    """Tokens that end an answer. None: as the model's configuration says."""
    prefix_cache: int | None = None
    """Bytes of keys and values of earlier prompts to keep for prompts that begin alike; 0: none. None: 1/32 of the
    memory of the machine, or of the GPU."""
