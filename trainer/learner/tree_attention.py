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

from cotune.integrations.models.device_copies import to_device
from cotune.trainer.learner.token_tree import Block, TokenTree, attention_blocks, hidden_keys, token_tree

NAME = "cotune_tree"
"""Name of the attention function in transformers."""
UNSUPPORTED_OPTIONS = ("softcap", "s_aux", "position_bias", "sliding_window")
"""Options that some models pass to their attention, and that this attention does not support."""
FLEX_BLOCK = 128
"""Tokens of a block of FlexAttention's masks. Trees are padded to whole blocks: kernels that are compiled for any
length fail at some other lengths (torch's issue 147756)."""

MASK_ROWS = 8
"""Blocks of queries that are compared with all keys at once. The comparison takes 67 MB at 65,536 tokens."""


class TreePass:
    """The inputs of a network for a tree: `tokens` and `depths` [T] on `device`, and the attention of its layers."""

    def __init__(
        self, tree: TokenTree, device: torch.device, *, flex: bool = False, blocks: Sequence[Block] = ()
    ) -> None:
        """`blocks` are the tree's blocks of attention, if they are computed already. FlexAttention (`flex`) needs
        none."""
        self.tokens = to_device(tree.tokens, device)
        self.depths = to_device(tree.depths, device)
        self.attend = FlexAttention(tree, device) if flex else BlockedAttention(tree, device, blocks)


class _Call(NamedTuple):
    """One call of the attention, over several padded sequences.

    `queries` [sequences x q] and `keys` [sequences x k] are numbers of tokens. `tokens` [n] are the queries without the
    padding, and `unpadded` [n] their positions in `queries`; None if no query is padding. `hidden` [sequences, 1, q, k]
    says which keys a query does not see; None if it sees all keys up to its own.
    """

    sequences: int
    queries: Tensor
    keys: Tensor
    tokens: Tensor
    unpadded: Tensor | None
    hidden: Tensor | None

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """Make the additive mask of the scores, [sequences, 1, q, k]; None if each query sees all keys up to its own.

        It is made for each use, because the masks of all calls would fill the memory.
        """
        if self.hidden is None:
            return None
        mask = torch.zeros(self.hidden.shape, dtype=dtype, device=self.hidden.device)
        return mask.masked_fill_(self.hidden, float("-inf"))

    def states(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gather the inputs of the attention, [sequences, heads, length, width] each, from states [T, heads, width]."""
        return self._gather(query, self.queries), self._gather(key, self.keys), self._gather(value, self.keys)

    def outputs(self, states: Tensor) -> Tensor:
        """Gather the rows of the queries, [sequences, heads, q, width], from states [T, heads, width]."""
        return self._gather(states, self.queries)

    def gradients(self, gradient: Tensor) -> Tensor:
        """Gather the gradients at the outputs of this call, [sequences, heads, q, width], from the gradients at the
        outputs of all tokens, `gradient` [T, heads, width]. They are zero for padded queries."""
        if self.unpadded is None:
            return self._gather(gradient, self.queries)
        # Padded queries have the number of token 0. With its gradient, that token would count several times.
        flat = gradient.new_zeros(len(self.queries), *gradient.shape[1:])  # [sequences x q, heads, width]
        flat.index_copy_(0, self.unpadded, gradient.index_select(0, self.tokens))
        return self._by_sequence(flat)

    def put(self, outputs: Tensor, states: Tensor) -> None:
        """Write the outputs of the queries, [sequences, heads, q, width], into `states` [T, heads, width]."""
        rows = outputs.transpose(1, 2).flatten(0, 1)  # [sequences x q, heads, width]
        if self.unpadded is not None:
            rows = rows.index_select(0, self.unpadded)
        states.index_copy_(0, self.tokens, rows)

    def _gather(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Gather [sequences, heads, length, width] from states [T, heads, width], by the numbers of the tokens,
        [sequences x length]."""
        return self._by_sequence(states.index_select(0, tokens))

    def _by_sequence(self, states: Tensor) -> Tensor:
        """Reshape [sequences x length, heads, width] to [sequences, heads, length, width]."""
        return states.unflatten(0, (self.sequences, -1)).transpose(1, 2)


class BlockedAttention:
    """Attention over a tree by a few calls of SDPA, each over queries that see much the same."""

    def __init__(self, tree: TokenTree, device: torch.device, blocks: Sequence[Block] = ()) -> None:
        self._calls = [_call_of_block(block, device) for block in blocks or attention_blocks(tree)]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """query [1, heads, T, width], key and value [1, groups, T, width]; returns [T, heads, width]."""
        # squeeze(0) and not [0], whose backward pass starts a kernel.
        states = (part.squeeze(0).transpose(0, 1) for part in (query, key, value))
        output: Tensor = _AttendInCalls.apply(*states, self._calls, scaling)
        return output


class _AttendInCalls(torch.autograd.Function):  # type: ignore[misc]
    """Stores the states of each token once. The backward pass gathers the states of each call again.

    query [T, heads, width], key and value [T, groups, width]; returns [T, heads, width].
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, calls: Sequence[_Call], scaling: float | None
    ) -> Tensor:
        """Run the calls one after the other. Each writes the output of its queries."""
        tokens, heads, _ = query.shape
        output = query.new_empty(tokens, heads, value.shape[2])
        log_sums = []
        for call in calls:
            outputs, log_sums_of_call = _attend(*call.states(query, key, value), call.mask(query.dtype), scaling)
            call.put(outputs, output)
            log_sums.append(log_sums_of_call)
        # The calls' gathered copies are not kept: together they take several times the memory of the states.
        ctx.save_for_backward(query, key, value, output, *log_sums)
        ctx.calls = calls
        ctx.scaling = scaling
        return output

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key and value, summed over the calls."""
        query, key, value, output, *log_sums = ctx.saved_tensors
        query_gradient = torch.empty_like(query)
        key_gradient = torch.zeros_like(key)
        value_gradient = torch.zeros_like(value)
        calls: Sequence[_Call] = ctx.calls
        for call, log_sums_of_call in zip(calls, log_sums, strict=True):
            states = call.states(query, key, value)
            mask = call.mask(query.dtype)
            output_gradient = call.gradients(gradient)
            # The CPU's backward kernel takes the sums of the forward pass. Other kernels are run again under autograd.
            if log_sums_of_call is None:
                gradients = _recomputed_gradients(*states, mask, ctx.scaling, output_gradient)
            else:
                gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    output_gradient,
                    *states,
                    call.outputs(output),
                    log_sums_of_call,
                    0.0,
                    mask is None,
                    attn_mask=mask,
                    scale=ctx.scaling,
                )
            # A token is a query in one call only, but a key in several, whose gradients add up.
            query_part, key_part, value_part = gradients  # [sequences, heads or groups, length, width]
            call.put(query_part, query_gradient)
            key_gradient.index_add_(0, call.keys, key_part.transpose(1, 2).flatten(0, 1))
            value_gradient.index_add_(0, call.keys, value_part.transpose(1, 2).flatten(0, 1))
        return query_gradient, key_gradient, value_gradient, None, None


class FlexAttention:
    """Attention over a tree by FlexAttention: one kernel, compiled for a GPU, that skips blocks that no token sees."""

    def __init__(self, tree: TokenTree, device: torch.device) -> None:
        """Prepare the mask of a tree on `device`, padded to whole blocks of the kernel."""
        self._padding = -len(tree.tokens) % FLEX_BLOCK
        # A padding token sees only itself, and no token sees it.
        padding = np.arange(len(tree.tokens), len(tree.tokens) + self._padding)
        place = to_device(np.append(tree.places, padding), device)
        last = to_device(np.append(tree.lasts, padding), device)

        def is_seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            # A token sees itself and its ancestors: see `TokenTree`.
            return (place[key] <= place[query]) & (place[query] <= last[key])

        self._mask = _block_mask(place, last, is_seen)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """query [1, heads, T, width], key and value [1, groups, T, width]; returns [T, heads, width].

        On the CPU this works only without gradients.
        """
        # The kernel needs whole blocks of tokens. pad() counts axes from the last one: width, then tokens.
        padded_query, padded_key, padded_value = (
            pad(states, (0, 0, 0, self._padding)) for states in (query, key, value)
        )
        output = _kernel(query.device.type)(
            padded_query,
            padded_key,
            padded_value,
            block_mask=self._mask,
            scale=scaling,
            enable_gqa=key.shape[1] != query.shape[1],
        )
        tokens = query.shape[2]
        states: Tensor = output[0].transpose(0, 1)  # [1, heads, T + padding, width] to [T + padding, heads, width]
        return states[:tokens]


def _block_mask(place: Tensor, last: Tensor, is_seen: Callable[..., Tensor]) -> Any:
    """Make the mask of FlexAttention, which says for each block of queries which blocks of keys it sees.

    It equals the mask that torch's `create_block_mask` makes from `is_seen`, with less memory: torch's function makes a
    mask of T x T entries, 4.3 GB at 65,536 tokens, and several times as much for its steps. `place` and `last` [T] are
    the places of the tokens, and of the ends of their subtrees, in a walk through the tree.
    """
    from torch.nn.attention.flex_attention import BlockMask

    blocks = len(place) // FLEX_BLOCK
    # [blocks of queries, blocks of keys]: whether any query sees any key of the block, and whether every query sees
    # every key. The kernel skips blocks that are not seen, and compares single tokens only in partly seen ones.
    any_seen = torch.empty(blocks, blocks, dtype=torch.bool, device=place.device)
    all_seen = torch.empty_like(any_seen)
    for start in range(0, blocks, MASK_ROWS):
        rows = slice(start, start + MASK_ROWS)
        query_places = place.view(blocks, FLEX_BLOCK)[rows].reshape(-1, 1)
        seen = (place <= query_places) & (query_places <= last)  # [queries of these rows, T]
        seen_by_block = seen.view(-1, FLEX_BLOCK, blocks, FLEX_BLOCK)  # [rows, queries, blocks, keys]
        any_seen[rows] = seen_by_block.any(3).any(1)
        all_seen[rows] = seen_by_block.all(3).all(1)

    def selected_blocks(mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return a mask [blocks, blocks] in torch's form: for each block of queries, how many blocks of keys the mask
        selects, [1, 1, blocks], and the indices of all blocks of keys, the selected ones first, [1, 1, blocks,
        blocks]."""
        indices = mask.int().argsort(stable=True, dim=1, descending=True)
        return mask.sum(1, dtype=torch.int32)[None, None], indices.int()[None, None]

    lengths = len(place), len(place)
    return BlockMask.from_kv_blocks(
        *selected_blocks(any_seen & ~all_seen),
        *selected_blocks(all_seen),
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=is_seen,
        seq_lengths=lengths,
    )


@cache
def _kernel(device: str) -> Any:
    """Return the function of FlexAttention, compiled on a GPU for any number of tokens."""
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention if device == "cpu" else torch.compile(flex_attention, dynamic=True)


def _call_of_block(block: Block, device: torch.device) -> _Call:
    """Make the call of the attention that computes a block, with its indices on `device`."""
    queries = block.queries.ravel()
    is_unpadded = block.real.ravel()
    unpadded: Tensor | None = None
    if not is_unpadded.all():
        unpadded = to_device(is_unpadded.nonzero()[0], device)
    hidden: Tensor | None = None
    if block.spans is not None:
        # The mask has q x k entries, so the three small arrays are sent to the device, and the mask is made there.
        query_places, key_places, key_lasts = (to_device(span, device) for span in block.spans)
        hidden = hidden_keys(query_places, key_places, key_lasts)[:, None]  # the same for all heads
    return _Call(
        sequences=len(block.queries),
        queries=to_device(queries, device),
        keys=to_device(block.keys.ravel(), device),
        tokens=to_device(queries[is_unpadded], device),
        unpadded=unpadded,
        hidden=hidden,
    )


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    tree: TreePass | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend over a `tree`; without one, attend by SDPA. This is the function that transformers calls.

    query [1, heads, T, width], key and value [1, groups, T, width]; returns [1, T, heads, width] and None.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if tree is None:
        ordinary: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return ordinary
    unsupported = [name for name in UNSUPPORTED_OPTIONS if options.get(name) is not None]
    if unsupported:
        raise NotImplementedError(f"{type(module).__name__} asks its attention for {unsupported}")
    device_type = query.device.type
    if torch.is_autocast_enabled(device_type):
        # Norms return queries and keys in float32, but the values are in autocast's precision. All three must agree.
        dtype = torch.get_autocast_dtype(device_type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    return tree.attend(query, key, value, scaling)[None], None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
) -> tuple[Tensor, Tensor | None]:
    """Attend with states [sequences, heads, length, width]. Returns the outputs, [sequences, heads, q, width], and on a
    CPU also the log-sum-exp of the scores of each query (None elsewhere)."""
    # On a CPU, call the kernel of SDPA itself: SDPA does not return the log-sums, which the backward kernel needs. It
    # takes queries and values of one width only.
    if query.device.type == "cpu" and query.shape[3] == value.shape[3]:
        dropout = 0.0
        is_causal = mask is None
        outputs, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout, is_causal, attn_mask=mask, scale=scaling
        )
        return outputs, log_sums
    return _attend_by_sdpa(query, key, value, mask, scaling), None


def _recomputed_gradients(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, gradient: Tensor
) -> tuple[Tensor, ...]:
    """Compute the gradients of query, key and value by running SDPA again under autograd. `gradient` is the gradient of
    its output."""
    with torch.enable_grad():
        query, key, value = (states.detach().requires_grad_() for states in (query, key, value))
        outputs = _attend_by_sdpa(query, key, value, mask, scaling)
        gradients: tuple[Tensor, ...] = torch.autograd.grad(outputs, (query, key, value), gradient)
    return gradients


def _attend_by_sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Attend by torch's SDPA. query [sequences, heads, length, width], key and value with fewer heads (groups). Without
    a `mask`, each query sees the keys up to its position."""
    heads_per_group = query.shape[1] // key.shape[1]
    # CUDA has no fused kernel for grouped keys with a mask or in float32, so each head gets a copy.
    if heads_per_group > 1 and query.is_cuda and (mask is not None or query.dtype == torch.float32):
        key = key.repeat_interleave(heads_per_group, 1)
        value = value.repeat_interleave(heads_per_group, 1)
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
    """Compute the last hidden state of each token of a tree, [T, hidden]. The network must attend over trees
    (`attends_over_trees`)."""
    # Transformers makes no mask of its own if it gets one with four axes. `tree_attention` ignores it.
    unused_mask = torch.empty(1, 1, 1, 1, device=tree.tokens.device)
    output = network.base_model(
        input_ids=tree.tokens[None],
        position_ids=tree.depths[None],
        attention_mask=unused_mask,
        use_cache=False,
        tree=tree,
    )
    states: Tensor = output.last_hidden_state[0]
    return states


def attends_over_trees(network: Any, *, flex: bool = False) -> bool:
    """Give the network an attention over trees, if it can have one. Returns whether it has one now.

    Each layer must attend to all earlier tokens and distinguish them by position ids alone. The network's configuration
    must say so, and a trial with a few tokens checks that the outputs stay the same.
    """
    if not use_tree_attention(network):
        return False
    if _computes_the_same(network, flex):
        return True
    network.set_attn_implementation("sdpa")
    return False


def use_tree_attention(network: Any) -> bool:
    """Give the network an attention over trees without a trial. Returns False if its configuration rules that out."""
    config = network.config.get_text_config()
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        attends_to_all = set(layer_types) == {"full_attention"}
    else:
        # Older configurations have one kind of attention for all layers.
        has_window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        attends_to_all = not has_window
    if not attends_to_all or network.config._attn_implementation != "sdpa":
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
    """Whether the network computes the same states for the sequences of a small tree at once and one by one. False also
    if it cannot run with the attention over trees."""
    device = network.get_input_embeddings().weight.device
    if device.type == "meta":
        return True  # this rank has no weights; the rank that has them tries it, and tells the others
    # A small tree that branches at two depths: two sequences leave the first one after three tokens, one after six.
    vocabulary = network.config.get_text_config().vocab_size
    first = [number % vocabulary for number in (1, 5, 2, 7, 3, 6, 4, 8)]
    sequences = [
        first,
        [*first[:3], 9 % vocabulary, 2 % vocabulary],
        [*first[:3], 3 % vocabulary],
        [*first[:6], 1 % vocabulary, 0],
    ]
    tree = token_tree(sequences)
    in_tree: list[Tensor] = []
    one_by_one: list[Tensor] = []
    try:
        with torch.no_grad():
            states = states_over(network, TreePass(tree, device, flex=flex))
            for ids, path in zip(sequences, tree.paths, strict=True):
                in_tree.append(states[torch.from_numpy(path).to(device)])
                output = network.base_model(input_ids=torch.tensor([ids], device=device), use_cache=False)
                one_by_one.append(output.last_hidden_state[0])
    except (AttributeError, TypeError, NotImplementedError, RuntimeError):
        return False  # models of other code fail in many ways on inputs that they do not expect
    computed = torch.cat(in_tree)
    expected = torch.cat(one_by_one)
    # In bfloat16 rounding alone makes a difference of 2% to 7% (SmolLM2-135M, two kernels of products). Wrong
    # positions, masks or scales make one of 23% or more there.
    tolerance = 1e-4 if expected.dtype == torch.float32 else 0.15
    return bool((computed - expected).norm() <= tolerance * expected.norm())
