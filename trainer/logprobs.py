"""Log-probabilities of response tokens from hidden states, in chunks that never hold all logits at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 4 * 2**20
CHUNK_ROWS = {"cpu": 64, "cuda": 256}
"""A chunk has as many tokens as fit their fp32 logits into `CHUNK_BYTES` (a cache), but at least so many, for which
reading the output embedding pays. About three buffers of a chunk live at a time."""


class _ChunkedLogprobs(torch.autograd.Function):
    """Keeps hidden states and two numbers per token; the backward pass computes each chunk's logits again.

    With z = W h / T, log p = z - logsumexp(z) and H = -sum(p log p):
    d log p[y] / dz = onehot(y) - p, and dH / dz = -p (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: Tensor, rows: int
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        lse = torch.empty_like(logprobs)
        for part in _parts(len(targets), rows):
            z = _logits(hidden[part], weight, bias, temperature[part])
            lse[part] = torch.logsumexp(z, dim=-1)
            z -= lse[part, None]
            logprobs[part] = z.gather(1, targets[part, None]).squeeze(1)
            entropy[part] = -torch.linalg.vecdot(z.exp(), z)
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, lse, entropy)
        ctx.rows = rows
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperature, lse, entropy = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        grad_bias = torch.zeros_like(bias) if need_bias else None
        for part in _parts(len(targets), ctx.rows):
            z = _logits(hidden[part], weight, bias, temperature[part])
            z -= lse[part, None]
            grad = z.exp()
            if grad_entropy is None:
                grad *= -grad_logprobs[part, None]
            else:
                z += entropy[part, None]
                z *= -grad_entropy[part, None]
                if grad_logprobs is not None:
                    z -= grad_logprobs[part, None]
                grad *= z
            if grad_logprobs is not None:
                grad.scatter_add_(1, targets[part, None], grad_logprobs[part, None])
            grad /= temperature[part, None]
            grad = grad.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[part])
            if grad_weight is not None and grad_weight.dtype == grad.dtype:
                grad_weight.addmm_(grad.T, hidden[part])
            elif grad_weight is not None:
                grad_weight += grad.T @ hidden[part]
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        return grad_hidden, grad_weight, grad_bias, None, None, None


def token_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-probability of `targets[n]` and entropy of its distribution, softmax(W hidden[n] / temperature[n]), in nats.

    hidden [N, H], weight [V, H], bias [V] or None, targets [N] (int64), temperature [N], all above 0. Returns two
    float32 tensors [N], both differentiable in hidden, weight and bias. Memory beyond the inputs and gradients:
    about three chunks.
    """
    rows = max(CHUNK_ROWS.get(hidden.device.type, 64), CHUNK_BYTES // (4 * weight.shape[0]))
    weight = weight.to(hidden.dtype)
    bias = None if bias is None else bias.to(hidden.dtype)
    return _ChunkedLogprobs.apply(hidden, weight, bias, targets, temperature, rows)


def _parts(total: int, rows: int) -> list[slice]:
    return [slice(start, min(start + rows, total)) for start in range(0, total, rows)]


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: Tensor) -> Tensor:
    return torch.nn.functional.linear(hidden, weight, bias).float().div_(temperature[:, None])
