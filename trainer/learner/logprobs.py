"""Log-probabilities of response tokens from hidden states, in chunks that never hold all logits at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cotune.integrations.models.bfloat16 import exact_product, pack
from cotune.integrations.models.device_copies import to_device
from cotune.integrations.models.float32 import product, widened_product

FORBIDDEN = -1e9
"""The logit of a token that a grammar forbids, and of padding. Its probability is 0 in fp32. Unlike -inf, 0 times it
is still 0."""

CHUNK_BYTES = 4 * 2**20
CHUNK_ROWS = {"cpu": 64, "cuda": 256}
"""The fp32 logits of a chunk fit into `CHUNK_BYTES` (a cache). But a chunk has at least `CHUNK_ROWS` tokens, because
each chunk reads the whole output embedding. About three buffers of a chunk live at a time."""


class LogitShaping(NamedTuple):
    """The changes to the logits before each token was sampled: masks of allowed tokens, and biases.

    `bits` [M, words] (int32, as `grammar.Bits`) and `added` [B, V] hold each distinct mask and bias once, on the device
    of the logits. `bits_at` and `added_at` [N] (int64) are the indices of each token's mask and bias, -1 for none. They
    stay on the CPU, so that it knows which logits change without waiting for a GPU.
    """

    bits: Tensor
    bits_at: Tensor
    added: Tensor
    added_at: Tensor

    def apply(self, logits: Tensor, part: slice) -> None:
        """Change the logits of the tokens in `part` in place, [tokens of `part`, V]."""
        _change_rows(logits, self.bits_at[part], self._forbid)
        _change_rows(logits, self.added_at[part], self._add)

    def _forbid(self, logits: Tensor, masks: Tensor) -> Tensor:
        """Apply to each row of logits [n, V] the mask with its number in `masks` [n]."""
        bit = torch.arange(32, dtype=torch.int32, device=logits.device)
        bits = self.bits[masks, :, None] >> bit & 1  # [n, words, 32]
        allowed = bits.bool().flatten(1)[:, : logits.shape[1]]
        return logits.masked_fill_(~allowed, FORBIDDEN)

    def _add(self, logits: Tensor, biases: Tensor) -> Tensor:
        """Add to each row of logits [n, V] the bias with its number in `biases` [n]."""
        return logits + self.added[biases]


def _change_rows(logits: Tensor, numbers: Tensor, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Change the rows of logits [n, V] that have a mask (or a bias), in place.

    `numbers` [n] has the number of each row's mask (or bias), -1 for none. `change` returns the new rows from the rows
    to change, and their numbers.
    """
    changed = (numbers >= 0).nonzero().squeeze(1)
    if len(changed):
        rows = to_device(changed, logits.device)
        numbers_of_rows = to_device(numbers[changed], logits.device)
        logits.index_copy_(0, rows, change(logits.index_select(0, rows), numbers_of_rows))


class LogitOptions(NamedTuple):
    """How logits are computed from hidden states."""

    shaping: LogitShaping | None
    rows: int
    """The number of tokens of a chunk."""
    head: Head | None
    """The output embedding to use in place of `weight`, if it is not trained."""
    token_ids: int
    """The number of logits that are tokens. The logits after them are padding."""


class Head:
    """An output embedding [V, H] that is not trained, for products in bfloat16 with logits in float32."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.detach().bfloat16()
        self._packed = pack(self.weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits, [N, V], of the hidden states, [N, H]."""
        return exact_product(hidden.bfloat16(), self._packed)


class _ChunkedLogprobs(torch.autograd.Function):  # type: ignore[misc]
    """Keeps hidden states and two numbers per token; the backward pass computes each chunk's logits again.

    With z = (W h + b, shaped) / T, log p = z - logsumexp(z) and H = -sum(p log p):
    d log p[y] / dz = onehot(y) - p, and dH / dz = -p (log p + H).

    If only the hidden states have a gradient, the forward pass also computes d log p[y] / dh, `slope`. The backward
    pass then needs no logits, unless the entropy has a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: Tensor,
        options: LogitOptions,
    ) -> tuple[Tensor, Tensor]:
        """Compute the log-probability and the entropy [N] of each target token, in chunks of `options.rows` tokens.

        hidden [N, H], weight [V, H], bias [V], targets [N] (token ids), temperature [N].
        """
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        lse = torch.empty_like(logprobs)
        # With LoRA only the hidden states (not weight and bias) have a gradient.
        only_hidden = ctx.needs_input_grad[:3] == (True, False, False)
        slope = torch.empty_like(hidden, dtype=weight.dtype) if only_hidden else None
        for part in _slices(len(targets), options.rows):
            z = _logits(hidden, weight, bias, temperature, options, part)
            lse[part] = torch.logsumexp(z, dim=-1)
            z -= lse[part, None]  # from here on, z is log p
            logprobs[part] = z.gather(1, targets[part, None]).squeeze(1)
            p = z.exp()
            entropy[part] = -torch.linalg.vecdot(p, z)
            if slope is not None:
                # d log p[y] / d(W h) = (onehot(y) - p) / T, written over p, which is not needed any more.
                gradient = p.neg_().scatter_add_(1, targets[part, None], p.new_ones(len(p), 1))
                gradient /= temperature[part, None]
                slope[part] = product(gradient.to(weight.dtype), weight.t())
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, lse, entropy, slope)
        ctx.options = options
        # An output that the loss does not use has the gradient None, in place of a tensor of zeros.
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        """Compute the gradients of hidden, weight and bias, chunk by chunk, by the formulas of the class. A gradient of
        None means that the loss does not use the log-probabilities, or the entropy."""
        hidden, weight, bias, targets, temperature, lse, entropy, slope = ctx.saved_tensors
        # If only the hidden states need a gradient, and only of log-probabilities, the forward pass has its slope.
        if slope is not None and grad_entropy is None and grad_logprobs is not None:
            grad_hidden = (slope * grad_logprobs[:, None]).to(hidden.dtype)
            return grad_hidden, None, None, None, None, None
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        grad_bias = torch.zeros_like(bias) if need_bias else None
        for part in _slices(len(targets), ctx.options.rows):
            z = _logits(hidden, weight, bias, temperature, ctx.options, part)
            z -= lse[part, None]  # from here on, z is log p
            grad_logits = z.exp()  # p, which becomes the gradient of the logits in place

            # The terms that are multiples of p: p (-(log p + H) grad_entropy - grad_logprobs).
            if grad_entropy is None:
                assert grad_logprobs is not None
                grad_logits *= -grad_logprobs[part, None]
            else:
                z += entropy[part, None]
                z *= -grad_entropy[part, None]
                if grad_logprobs is not None:
                    z -= grad_logprobs[part, None]
                grad_logits *= z
            # The one-hot term of d log p[y] / dz.
            if grad_logprobs is not None:
                grad_logits.scatter_add_(1, targets[part, None], grad_logprobs[part, None])
            grad_logits /= temperature[part, None]

            # From the logits to hidden states, weight and bias.
            rounded = grad_logits.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = product(rounded, weight.t())
            if grad_weight is not None and grad_weight.dtype == rounded.dtype:
                grad_weight.addmm_(rounded.T, hidden[part])
            elif grad_weight is not None:
                grad_weight += rounded.T @ hidden[part]
            if grad_bias is not None:
                grad_bias += rounded.sum(0)
        return grad_hidden, grad_weight, grad_bias, None, None, None  # none for targets, temperature and options


def token_logprobs(
    hidden: Tensor,
    weight: Tensor | Head,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Tensor,
    shaping: LogitShaping | None = None,
    token_ids: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of `targets[n]` and entropy of its distribution, softmax(W hidden[n] / temperature[n]), in nats.

    The distribution is computed after `shaping` has forbidden tokens or added to logits. It is over the first
    `token_ids` of the V logits (default: all).

    hidden [N, H], weight [V, H] (a `Head` has no gradient), bias [V] or None, targets [N] (int64), temperature [N], all
    above 0. Returns two float32 tensors [N], both differentiable in hidden, weight and bias. Memory beyond the inputs
    and gradients: about three chunks.
    """
    head = weight if isinstance(weight, Head) else None
    weight = weight.weight if isinstance(weight, Head) else weight.to(hidden.dtype)
    rows = chunk_tokens(weight.shape[0], hidden.device.type)
    bias = None if bias is None else bias.to(hidden.dtype)
    token_ids = weight.shape[0] if token_ids is None else token_ids
    options = LogitOptions(shaping, rows, head, token_ids)
    logprobs, entropy = _ChunkedLogprobs.apply(hidden, weight, bias, targets, temperature, options)
    return logprobs, entropy


def chunk_tokens(vocabulary: int, device: str) -> int:
    """Return the number of tokens of a chunk, for a model with this vocabulary on this kind of device."""
    return max(CHUNK_ROWS.get(device, 64), CHUNK_BYTES // (4 * vocabulary))


def _slices(total: int, rows: int) -> list[slice]:
    return [slice(start, min(start + rows, total)) for start in range(0, total, rows)]


def _logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: Tensor,
    options: LogitOptions,
    part: slice,
) -> Tensor:
    """Compute the logits of the tokens in `part`, divided by their temperature, [tokens of `part`, V], in float32.

    `options` may shape them. Logits that are no tokens are forbidden.
    """
    head = options.head
    logits = widened_product(hidden[part], weight) if head is None else head.logits(hidden[part])
    if bias is not None:
        logits.add_(bias)
    if options.shaping is not None:
        options.shaping.apply(logits, part)
    if options.token_ids < logits.shape[1]:  # filled and not cut off: GPUs multiply matrices of padded sizes faster
        logits[:, options.token_ids :] = FORBIDDEN
    return logits.div_(temperature[part, None])
