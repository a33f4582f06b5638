"""Attention over a token tree: each token sees itself and its ancestors, in any model with attention of that kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad, scaled_dot_product_attention

from cotune.trainer.learner.device import to_device
from cotune.trainer.learner.token_tree import Block, TokenTree, attention_blocks, hidden_keys, token_tree

NAME = "cotune_tree"
"""Of the attention function, in transformers."""
OTHER = ("softcap", "s_aux", "position_bias", "sliding_window")
"""What a model may ask of its attention and this one does not do."""
FLEX_BLOCK = 128
"""Tokens of a block of FlexAttention's masks: trees are padded to whole ones, as kernels compiled for any length fail
at some that are not (torch's issue 147756)."""

MASK_ROWS = 8
"""Blocks of queries that are compared with all keys at once: 67 MB at 65,536 tokens."""


class TreePass:
    """What a network needs to know of a tree: `tokens`, `depths` [T] on `device`, and the attention of its layers.

    `blocks` are the tree's, if they are known already.
    """

    def __init__(
        self, tree: TokenTree, device: torch.device, *, flex: bool = False, blocks: Sequence[Block] = ()
    ) -> None:
        self.tokens = to_device(tree.tokens, device)
        self.depths = to_device(tree.depths, device)
        self.attend = FlexAttention(tree, device) if flex else BlockedAttention(tree, device, blocks)


class _Call(NamedTuple):
    """One call of the attention, of several padded sequences.

    `queries` [sequences x q] and `keys` [sequences x k] are numbers of tokens; `tokens` [n] are those of the queries
    that are no padding, and `places` [n] where they stand among these, None for in order. `hidden` [sequences, 1, q, k]
    says which keys a query does not see, None for those after its own.
    """

    sequences: int
    queries: Tensor
    keys: Tensor
    tokens: Tensor
    places: Tensor | None
    hidden: Tensor | None

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """What is added to scores; made for each use, as those of all calls would take several times their memory."""
        if self.hidden is None:
            return None
        mask = torch.zeros(self.hidden.shape, dtype=dtype, device=self.hidden.device)
        return mask.masked_fill_(self.hidden, float("-inf"))

    def states(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the attention takes, [sequences, heads, length, width] each, of states [T, heads, width]."""
        return self._of(query, self.queries), self._of(key, self.keys), self._of(value, self.keys)

    def outputs(self, states: Tensor) -> Tensor:
        """Those of the queries, [sequences, heads, q, width], of states [T, heads, width]."""
        return self._of(states, self.queries)

    def gradients(self, states: Tensor) -> Tensor:
        """The same, with zeros for padding."""
        if self.places is None:
            return self.outputs(states)
        # Padding repeats token 0, whose gradient must not count again.
        found = states.new_zeros(len(self.queries), *states.shape[1:])
        return self._apart(found.index_copy_(0, self.places, states.index_select(0, self.tokens)))

    def put(self, found: Tensor, states: Tensor) -> None:
        """Write what the queries have got, [sequences, heads, q, width], into `states` [T, heads, width]."""
        rows = found.transpose(1, 2).flatten(0, 1)
        states.index_copy_(0, self.tokens, rows if self.places is None else rows.index_select(0, self.places))

    def _of(self, states: Tensor, at: Tensor) -> Tensor:
        return self._apart(states.index_select(0, at))

    def _apart(self, states: Tensor) -> Tensor:
        return states.unflatten(0, (self.sequences, -1)).transpose(1, 2)


class BlockedAttention:
    """Attention over a tree by a few calls of SDPA, each over queries that see much the same."""

    def __init__(self, tree: TokenTree, device: torch.device, blocks: Sequence[Block] = ()) -> None:
        self._calls = [_call(block, device) for block in blocks or attention_blocks(tree)]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """query [1, heads, T, width], key and value [1, groups, T, width]; returns [T, heads, width]."""
        states = (part.squeeze(0).transpose(0, 1) for part in (query, key, value))  # [0] has a kernel in its gradient
        output: Tensor = _OverCalls.apply(*states, self._calls, scaling)
        return output


class _OverCalls(torch.autograd.Function):  # type: ignore[misc]
    """Keeps the states of each token once; the backward pass gathers those of a call again, as the forward pass did.

    query [T, heads, width], key and value [T, groups, width]; returns [T, heads, width].
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, calls: Sequence[_Call], scaling: float | None
    ) -> Tensor:
        """Run the calls one after the other; each writes the output of its queries."""
        output = query.new_empty(*query.shape[:2], value.shape[2])  # [T, heads, width]
        sums = []
        for call in calls:
            found, summed = _attend(*call.states(query, key, value), call.mask(query.dtype), scaling)
            call.put(found, output)
            sums.append(summed)
        # The calls' gathered copies are not kept: together they take several times the memory of the states.
        ctx.save_for_backward(query, key, value, output, *sums)
        ctx.calls, ctx.scaling = calls, scaling
        return output

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key and value, summed over the calls."""
        query, key, value, output, *sums = ctx.saved_tensors
        of_query, of_key, of_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        calls: Sequence[_Call] = ctx.calls
        for call, summed in zip(calls, sums, strict=True):
            states, mask, above = call.states(query, key, value), call.mask(query.dtype), call.gradients(gradient)
            # The CPU's kernel is given the sums of the forward pass; any other is run again under autograd.
            if summed is None:
                found = _recomputed_gradients(*states, mask, ctx.scaling, above)
            else:
                found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    above, *states, call.outputs(output), summed, 0.0, mask is None, attn_mask=mask, scale=ctx.scaling
                )  # fmt: skip
            call.put(found[0], of_query)  # a token is a query once, and a key in several calls: those add up
            of_key.index_add_(0, call.keys, found[1].transpose(1, 2).flatten(0, 1))
            of_value.index_add_(0, call.keys, found[2].transpose(1, 2).flatten(0, 1))
        return of_query, of_key, of_value, None, None


class FlexAttention:
    """The same by FlexAttention: one kernel, compiled for a GPU, that skips what no token sees.

    Each token sees itself and its ancestors: those between whose place and last place in the walk it stands.
    """

    def __init__(self, tree: TokenTree, device: torch.device) -> None:
        """Prepare the mask of a tree on `device`, padded to whole blocks of the kernel."""
        self._more = -len(tree.tokens) % FLEX_BLOCK
        alone = np.arange(len(tree.tokens), len(tree.tokens) + self._more)  # padding: sees itself, and nobody sees it
        place, last = (to_device(np.append(part, alone), device) for part in (tree.places, tree.lasts))

        def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (place[key] <= place[query]) & (place[query] <= last[key])

        self._mask = _block_mask(place, last, seen)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """As `BlockedAttention`. Without a gradient also on the CPU."""
        query, key, value = (pad(part, (0, 0, 0, self._more)) for part in (query, key, value))
        output = _kernel(query.device.type)(
            query, key, value, block_mask=self._mask, scale=scaling, enable_gqa=key.shape[1] != query.shape[1]
        )
        states: Tensor = output[0].transpose(0, 1)
        return states[: len(states) - self._more]


def _block_mask(place: Tensor, last: Tensor, seen: Callable[..., Tensor]) -> Any:
    """What torch's `create_block_mask` makes of `seen`, without its mask of T x T entries: 4.3 GB at 65,536 tokens, and
    several times that for its steps."""
    from torch.nn.attention.flex_attention import BlockMask

    blocks = len(place) // FLEX_BLOCK
    some, every = (torch.empty(blocks, blocks, dtype=torch.bool, device=place.device) for _ in range(2))
    for start in range(0, blocks, MASK_ROWS):
        rows = slice(start, start + MASK_ROWS)
        queries = place.view(blocks, FLEX_BLOCK)[rows].reshape(-1, 1)
        tiles = ((place <= queries) & (queries <= last)).view(-1, FLEX_BLOCK, blocks, FLEX_BLOCK)
        some[rows], every[rows] = tiles.any(3).any(1), tiles.all(3).all(1)

    def ordered(mask: Tensor) -> tuple[Tensor, Tensor]:
        """How many blocks of keys each block of queries has, [1, 1, blocks], and their numbers first."""
        numbers = mask.int().argsort(stable=True, dim=1, descending=True)
        return mask.sum(1, dtype=torch.int32)[None, None], numbers.int()[None, None]

    lengths = len(place), len(place)
    return BlockMask.from_kv_blocks(
        *ordered(some & ~every), *ordered(every), BLOCK_SIZE=FLEX_BLOCK, mask_mod=seen, seq_lengths=lengths
    )


@cache
def _kernel(device: str) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention if device == "cpu" else torch.compile(flex_attention, dynamic=True)


def _call(block: Block, device: torch.device) -> _Call:
    """Move the indices of a block to the device of the learner."""
    padded, real = block.queries.ravel(), block.real.ravel()
    return _Call(
        len(block.queries),
        to_device(padded, device),
        to_device(block.keys.ravel(), device),
        to_device(padded[real], device),
        None if real.all() else to_device(real.nonzero()[0], device),
        None if block.spans is None else hidden_keys(*(to_device(part, device) for part in block.spans))[:, None],
    )


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
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        # Norms return queries and keys in float32, but the values are in autocast's precision; all three must agree.
        query, key, value = (states.to(torch.get_autocast_dtype(kind)) for states in (query, key, value))
    return tree.attend(query, key, value, scaling)[None], None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
) -> tuple[Tensor, Tensor | None]:
    """[sequences, heads, q, width] for states of the same form, and what the CPU's kernel needs of it to be
    differentiated: the logarithms of the sums of its weights. SDPA has them and gives them to nobody."""
    if query.device.type == "cpu" and query.shape[3] == value.shape[3]:
        found, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, mask is None, attn_mask=mask, scale=scaling
        )
        return found, sums
    return _sdpa(query, key, value, mask, scaling), None


def _recomputed_gradients(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, gradient: Tensor
) -> tuple[Tensor, ...]:
    """The gradients of query, key and value, where only SDPA itself knows how."""
    with torch.enable_grad():
        query, key, value = (part.detach().requires_grad_() for part in (query, key, value))
        gradients: tuple[Tensor, ...] = torch.autograd.grad(
            _sdpa(query, key, value, mask, scaling), (query, key, value), gradient
        )
    return gradients


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Attend by torch's kernel, with grouped keys and values. Without a `mask` each query sees the keys up to its
    position."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and query.is_cuda and (mask is not None or query.dtype == torch.float32):  # no kernel is for groups
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
    if not use_tree_attention(network):
        return False
    if _computes_the_same(network, flex):
        return True
    network.set_attn_implementation("sdpa")
    return False


def use_tree_attention(network: Any) -> bool:
    """Give the network an attention that knows trees, without a trial. False if its configuration rules that out."""
    config = network.config.get_text_config()
    window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
    if kinds != {"full_attention"} or network.config._attn_implementation != "sdpa":
        return False
    if not network._can_set_attn_implementation():
        return False
    _register()
    network.set_attn_implementation(NAME)
    return True


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, tree_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def _computes_the_same(network: Any, flex: bool) -> bool:
    """Compare the states of a small tree with the states of its sequences one by one. False also if the network cannot
    run with the attention over trees."""
    vocabulary = network.config.get_text_config().vocab_size
    trunk = [number % vocabulary for number in (1, 5, 2, 7, 3, 6, 4, 8)]
    # Two branches after the third token and one after the sixth: several depths, and more than one branch at a place.
    sequences = [
        trunk,
        [*trunk[:3], 9 % vocabulary, 2 % vocabulary],
        [*trunk[:3], 3 % vocabulary],
        [*trunk[:6], 1 % vocabulary, 0],
    ]
    device = network.get_input_embeddings().weight.device
    if device.type == "meta":
        return True  # the rank that has the weights tries it, and tells the others
    tree = token_tree(sequences)
    try:
        with torch.no_grad():
            states = states_over(network, TreePass(tree, device, flex=flex))
            computed = torch.cat([states[torch.from_numpy(path).to(device)] for path in tree.paths])
            alone = [
                network.base_model(input_ids=torch.tensor([ids], device=device), use_cache=False) for ids in sequences
            ]
    except (AttributeError, TypeError, NotImplementedError, RuntimeError):
        return False
    expected = torch.cat([output.last_hidden_state[0] for output in alone])
    # In bfloat16 rounding alone makes a difference of 2% to 7% (SmolLM2-135M, two kernels of products). Wrong
    # positions, masks or scales make one of 23% or more there.
    tolerance = 1e-4 if expected.dtype == torch.float32 else 0.15
    return bool((computed - expected).norm() <= tolerance * expected.norm())
