"""Attention over a token tree: each token sees itself and its ancestors, in any model with attention of that kind."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from cotune.trainer.learner.token_tree import TokenTree, attention_blocks, token_tree, walk

NAME = "cotune_tree"
"""Of the attention function, in transformers."""
OTHER = ("softcap", "s_aux", "position_bias", "sliding_window")
"""What a model may ask of its attention and this one does not do."""


class _Call(NamedTuple):
    """Padded sizes of one call of the attention: sequences, queries and keys; `mask` [B, 1, q, k] is added to scores,
    None for a causal one."""

    sequences: int
    queries: int
    keys: int
    mask: Tensor | None


class TreePass:
    """What a network needs to know of a tree: `tokens`, `depths` [T] on `device`, and the attention of its layers."""

    def __init__(self, tree: TokenTree, device: torch.device, *, flex: bool = False) -> None:
        self.tokens = torch.from_numpy(tree.tokens).to(device)
        self.depths = torch.from_numpy(tree.depths).to(device)
        self.attend = FlexAttention(tree, device) if flex else BlockedAttention(tree, device)


class BlockedAttention:
    """Attention over a tree by a few calls of SDPA, each over queries that see much the same."""

    def __init__(self, tree: TokenTree, device: torch.device) -> None:
        blocks = attention_blocks(tree)
        self._queries = _joined([block.queries for block in blocks], device)
        self._keys = _joined([block.keys for block in blocks], device)
        real = np.concatenate([block.real.ravel() for block in blocks])
        queries = np.concatenate([block.queries.ravel() for block in blocks])
        places = np.empty(len(tree.tokens), np.int64)
        places[queries[real]] = real.nonzero()[0]
        self._places = torch.from_numpy(places).to(device)
        self._shapes = [(len(block.queries), block.queries.shape[1], block.keys.shape[1]) for block in blocks]
        self._allowed = [block.allowed for block in blocks]
        self._calls: dict[torch.dtype, list[_Call]] = {}

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """query [1, heads, T, width], key and value [1, groups, T, width]; returns [T, heads, width]."""
        queries = query[0].transpose(0, 1).index_select(0, self._queries)
        keys, values = (states[0].transpose(0, 1).index_select(0, self._keys) for states in (key, value))
        calls = self._calls_in(query.dtype)
        # The gradient of a split is one tensor, that of a slice is as large as the whole.
        widths = [call.sequences * call.queries for call in calls]
        lengths = [call.sequences * call.keys for call in calls]
        parts = zip(calls, queries.split(widths), keys.split(lengths), values.split(lengths), strict=True)
        outputs = []
        for call, *states in parts:
            q, k, v = (part.unflatten(0, (call.sequences, -1)).transpose(1, 2) for part in states)
            outputs.append(_attend(q, k, v, call.mask, scaling).transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs).index_select(0, self._places)

    def _calls_in(self, dtype: torch.dtype) -> list[_Call]:
        """Those of a layer, in the order of the queries and keys."""
        if dtype not in self._calls:
            self._calls[dtype] = [
                _Call(rows, width, length, None if allowed is None else _added(allowed, dtype, self._places.device))
                for (rows, width, length), allowed in zip(self._shapes, self._allowed, strict=True)
            ]
        return self._calls[dtype]


class FlexAttention:
    """The same by FlexAttention: one kernel, compiled for a GPU, that skips what no token sees.

    Each token sees itself and its ancestors: those between whose place and last place in the walk it stands.
    """

    def __init__(self, tree: TokenTree, device: torch.device) -> None:
        from torch.nn.attention.flex_attention import create_block_mask

        place, last = (torch.from_numpy(part).to(device) for part in walk(tree))

        def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (place[key] <= place[query]) & (place[query] <= last[key])

        self._mask = create_block_mask(seen, None, None, len(place), len(place), device=device)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """As `BlockedAttention`. Without a gradient also on the CPU."""
        output = _kernel(query.device.type)(
            query, key, value, block_mask=self._mask, scale=scaling, enable_gqa=key.shape[1] != query.shape[1]
        )
        states: Tensor = output[0].transpose(0, 1)
        return states


@cache
def _kernel(device: str) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention if device == "cpu" else torch.compile(flex_attention, dynamic=True)


def _joined(parts: list[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate([part.ravel() for part in parts])).to(device)


def _added(allowed: npt.NDArray[np.bool_], dtype: torch.dtype, device: torch.device) -> Tensor:
    mask = torch.zeros(allowed.shape, dtype=dtype, device=device)
    return mask.masked_fill_(torch.from_numpy(~allowed).to(device), float("-inf"))[:, None]


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    tree: TreePass | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """transformers' interface of an attention function; without a `tree` its ordinary attention.

    query [1, heads, T, width], key and value [1, groups, T, width]; returns [1, T, heads, width] and None.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if tree is None:
        found: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **more
        )
        return found
    asked = [name for name in OTHER if more.get(name) is not None]
    if asked:
        raise NotImplementedError(f"{type(module).__name__} asks its attention for {asked}")
    return tree.attend(query, key, value, scaling)[None], None


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and query.is_cuda and mask is not None:  # where the kernels for groups take no mask
        key, value = (states.repeat_interleave(groups, 1) for states in (key, value))
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=key.shape[1] != query.shape[1],
    )


def states_over(network: Any, tree: TreePass) -> Tensor:
    """[T, hidden] the last hidden state of each token of a tree, for a network that `attends_over_trees`."""
    ignored = torch.empty(1, 1, 1, 1, device=tree.tokens.device)  # four axes: transformers makes no mask of its own
    output = network.base_model(
        input_ids=tree.tokens[None],
        position_ids=tree.depths[None],
        attention_mask=ignored,
        use_cache=False,
        tree=tree,
    )
    states: Tensor = output.last_hidden_state[0]
    return states


def attends_over_trees(network: Any, *, flex: bool = False) -> bool:
    """Give the network an attention that knows trees, where it can have one; whether it then computes the same.

    It can where each layer is full attention over all earlier tokens, told apart by position ids alone: asked of its
    configuration, and tried with a few tokens.
    """
    config = network.config.get_text_config()
    window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
    if kinds != {"full_attention"} or network.config._attn_implementation != "sdpa":
        return False
    if not network._can_set_attn_implementation():
        return False
    _register()
    network.set_attn_implementation(NAME)
    if _computes_the_same(network, flex):
        return True
    network.set_attn_implementation("sdpa")
    return False


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, tree_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def _computes_the_same(network: Any, flex: bool) -> bool:
    most = network.config.get_text_config().vocab_size
    trunk = [number % most for number in (1, 5, 2, 7, 3, 6, 4, 8)]
    sequences = [trunk, [*trunk[:3], 9 % most, 2 % most], [*trunk[:3], 3 % most], [*trunk[:6], 1 % most, 0]]
    device = network.get_input_embeddings().weight.device
    tree = token_tree(sequences)
    try:
        with torch.no_grad():
            states = states_over(network, TreePass(tree, device, flex=flex))
            found = torch.cat([states[torch.from_numpy(path).to(device)] for path in tree.paths])
            alone = [
                network.base_model(input_ids=torch.tensor([ids], device=device), use_cache=False) for ids in sequences
            ]
    except (TypeError, NotImplementedError, RuntimeError):
        return False
    expected = torch.cat([output.last_hidden_state[0] for output in alone])
    tolerance = 1e-4 if expected.dtype == torch.float32 else 5e-2
    return bool((found - expected).norm() <= tolerance * expected.norm())
