"""The model of benchmarks that do not measure its size: a Qwen3 of 0.3M to 0.9M parameters."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


def small_qwen(vocabulary: int, **changes: Any) -> Qwen3ForCausalLM:
    """Untrained, the same each time; `changes` are fields of its configuration."""
    torch.manual_seed(0)
    usual = {
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    }
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=vocabulary, **{**usual, **changes}))
