"""Shapes of Qwen3 models, by their published configurations."""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers import Qwen3Config


class Shape(NamedTuple):
    """Sizes of a Qwen3 model."""

    hidden: int
    feed_forward: int
    layers: int
    heads: int
    key_heads: int
    """Heads of keys and values."""
    tied: bool = True
    """Whether the output embedding is the input embedding."""
    vocabulary: int = 151_936
    head_width: int = 128


QWEN3 = {
    "Qwen3-0.6B": Shape(1024, 3072, 28, 16, 8),
    "Qwen3-1.7B": Shape(2048, 6144, 28, 16, 8),
    "Qwen3-4B": Shape(2560, 9728, 36, 32, 8),
    "Qwen3-8B": Shape(4096, 12288, 36, 32, 8, tied=False),
}


def qwen3_config(shape: Shape, **more: Any) -> Qwen3Config:
    """The configuration of a model of this shape; `more` are further fields of it."""
    return Qwen3Config(
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        head_dim=shape.head_width,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=shape.tied,
        **more,
    )
