"""One decode step of the usual kind of decoder on the CPU, where what lies between its products takes most of the time.

The model library's layers take any shapes, masks and caches; these take one token of every row. Modules and weights are
the library's own, adapters included.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cotune.integrations.models.transformers.attention import Alike, attend
from cotune.integrations.models.transformers.cache import RowCache

USUAL = ("llama", "mistral", "qwen2", "qwen3")
"""Kinds of models whose layers are normalised attention with rotary positions, then a gated MLP, and nothing else."""


def is_usual(model: Any) -> bool:
    """Whether `DecodeStep` computes the same as this model, if all its layers attend to everything."""
    kind = type(model)
    library = any(kind.__module__ == f"transformers.models.{name}.modeling_{name}" for name in USUAL)
    return library and kind.__name__.endswith("ForCausalLM")


class DecodeStep:
    """The next step of all rows of a model that `is_usual`."""

    def __init__(self, model: Any) -> None:
        self._head, self._decoder = model.lm_head, model.model

    def __call__(self, tokens: Tensor, cache: RowCache, alike: Alike | None) -> Tensor:
        """Logits [rows, vocabulary] after `tokens` [rows], whose keys and values are kept in the cache."""
        decoder, rows = self._decoder, len(tokens)
        x = decoder.embed_tokens(tokens)
        cos, sin = decoder.rotary_emb(x, cache.positions())  # [rows, 1, head_dim]
        half = cos.shape[-1] // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), -1)
        mask: Tensor | None = None
        for layer, kept in zip(decoder.layers, cache.layers, strict=True):
            given, attention = layer.input_layernorm(x), layer.self_attn
            heads = (rows, -1, attention.head_dim)
            query, key = attention.q_proj(given).view(heads), attention.k_proj(given).view(heads)
            value = attention.v_proj(given).view(heads)
            if hasattr(attention, "q_norm"):
                query, key = attention.q_norm(query), attention.k_norm(key)
            turned = torch.cat((query, key), 1)
            turned = (turned * cos).addcmul_(torch.cat((turned[..., half:], turned[..., :half]), -1), sin)
            query, key = turned.split((query.shape[1], key.shape[1]), 1)
            keys, values = kept.update(key.unsqueeze(2), value.unsqueeze(2))
            query = query.reshape(rows, keys.shape[1], -1, attention.head_dim)
            if mask is None:
                mask = cache.mask().expand(*query.shape[:3], -1).contiguous()
            read = attend(query, keys, values, mask, attention.scaling, alike)
            x = attention.o_proj(read.view(rows, -1)).add_(x)
            given, mlp = layer.post_attention_layernorm(x), layer.mlp
            x = mlp.down_proj(mlp.act_fn(mlp.gate_proj(given)).mul_(mlp.up_proj(given))).add_(x)
        return self._head(decoder.norm(x))
