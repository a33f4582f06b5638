"""One decode step of common decoders on the CPU, where the code between matrix products takes most of the time.

The model library's layers accept any shapes, masks and caches, and this step accepts only one token per row. It uses
the library's weights and, except for norms, its modules, to which adapters are applied.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cotune.integrations.models.transformers.attention import SharedColumns, attend
from cotune.integrations.models.transformers.cache import RowCache
from cotune.integrations.models.transformers.lora import LoraRows, Projection

USUAL = ("llama", "mistral", "qwen2", "qwen3")
"""Kinds of models whose layers have only attention with rotary positions and a gated MLP, with a norm before each."""


def is_usual(model: Any) -> bool:
    """Whether `DecodeStep` computes the same as this model, if all its layers attend to all tokens."""
    kind = type(model)
    usual_modules = {f"transformers.models.{name}.modeling_{name}" for name in USUAL}
    return kind.__module__ in usual_modules and kind.__name__.endswith("ForCausalLM")


class _Layer(NamedTuple):
    input_norm: Callable[[Tensor], Tensor]
    qkv: Projection
    query_norm: Callable[[Tensor], Tensor] | None
    key_norm: Callable[[Tensor], Tensor] | None
    out: Projection
    mlp_norm: Callable[[Tensor], Tensor]
    gate_up: Projection
    act: Callable[[Tensor], Tensor]
    down: Projection


class DecodeStep:
    """Computes the next step of all rows, for a model that `is_usual`."""

    def __init__(self, model: Any, lora: LoraRows) -> None:
        """Collect the parts of a model that a decode step needs. `lora` adds the adapters of several policies to the
        model's products, as the rows of a batch may belong to different policies.
        """
        self._head = model.lm_head
        self._decoder = model.model
        self._norm = _rms_norm(model.model.norm)
        first = model.model.layers[0].self_attn
        self._head_dim = first.head_dim
        self._scaling = first.scaling
        self._layers = []
        for i, layer in enumerate(model.model.layers):
            name = f"model.layers.{i}"
            attention = layer.self_attn
            # A projection has all modules with the same input: k_proj and v_proj too.
            qkv = lora.projection(f"{name}.self_attn.q_proj")
            self._layers.append(
                _Layer(
                    input_norm=_rms_norm(layer.input_layernorm),
                    qkv=qkv,
                    query_norm=_rms_norm(getattr(attention, "q_norm", None)),
                    key_norm=_rms_norm(getattr(attention, "k_norm", None)),
                    out=lora.projection(f"{name}.self_attn.o_proj"),
                    mlp_norm=_rms_norm(layer.post_attention_layernorm),
                    gate_up=lora.projection(f"{name}.mlp.gate_proj"),  # with up_proj
                    act=layer.mlp.act_fn,
                    down=lora.projection(f"{name}.mlp.down_proj"),
                )
            )

    def __call__(self, tokens: Tensor, cache: RowCache, shared_columns: SharedColumns | None) -> Tensor:
        """Compute logits [rows, vocabulary] after `tokens` [rows], and write their keys and values to the cache."""
        rows = len(tokens)
        dim = self._head_dim
        half = self._head_dim // 2
        x = self._decoder.embed_tokens(tokens)
        cos, sin = self._decoder.rotary_emb(x, cache.positions())  # [rows, 1, head_dim]
        # With the first half of the sines negated, x * cos + roll(x) * sin turns both halves of a head.
        sin = torch.cat((-sin[..., :half], sin[..., half:]), -1)
        mask: Tensor | None = None
        for layer, layer_cache in zip(self._layers, cache.layers, strict=True):
            # 1. Queries, keys and values, [rows, heads, dim].
            query, key, value = (part.view(rows, -1, dim) for part in layer.qkv(layer.input_norm(x)))
            if layer.query_norm is not None and layer.key_norm is not None:
                query = layer.query_norm(query)
                key = layer.key_norm(key)
            both = torch.cat((query, key), 1)
            turned = (both * cos).addcmul_(both.roll(half, -1), sin)
            query, key = turned.split_with_sizes((query.shape[1], key.shape[1]), 1)

            # 2. Attention to all columns, and the new one.
            keys, values = layer_cache.write(key, value)
            query = query.reshape(rows, keys.shape[1], -1, dim)
            if mask is None:
                mask = cache.mask().expand(*query.shape[:3], -1).flatten(0, 1)
            attended = attend(query, keys, values, mask, self._scaling, shared_columns)
            x = layer.out(attended.view(rows, -1))[0].add_(x)

            # 3. The MLP.
            gate, up = layer.gate_up(layer.mlp_norm(x))
            x = layer.down(layer.act(gate).mul_(up))[0].add_(x)
        return self._head(self._norm(x))


def _rms_norm(norm: Any) -> Any:
    """A function that computes a float32 norm with half as many calls of torch; other modules as they are."""
    if norm is None or norm.weight.dtype != torch.float32:
        return norm
    return partial(_apply_norm, norm.weight, torch.full((1,), norm.variance_epsilon))


def _apply_norm(weight: Tensor, epsilon: Tensor, x: Tensor) -> Tensor:
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return (x * torch.addcmul(epsilon, length, length, value=1 / x.shape[-1]).rsqrt_()).mul_(weight)
