"""Draws the next token of every row of a batch, each with its own sampling parameters and random stream."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))

BLOCK = 64


class RowParams(NamedTuple):
    """Sampling parameters by row, in tensors [rows, 1]; None where no row needs it."""

    temperature: Tensor
    """1 for greedy rows, whose log-probabilities are the model's own."""
    greedy: Tensor | None
    all_greedy: bool
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None = None

    def rows(self, low: int, high: int) -> RowParams:
        """The parameters of rows [low, high)."""
        parts = (None if t is None else t[low:high] for t in (self.greedy, self.top_k, self.top_p, self.min_p))
        greedy, top_k, top_p, min_p = parts
        return RowParams(self.temperature[low:high], greedy, self.all_greedy, top_k, top_p, min_p)


def streams(seed: int, n: int) -> npt.NDArray[np.uint64]:
    """One random stream per candidate of a request."""
    root = _mix(np.array([seed % 2**64], np.uint64))
    return _mix(root ^ (np.arange(n, dtype=np.uint64) * _GAMMA))


def uniforms(stream: npt.NDArray[np.uint64], position: npt.NDArray[np.integer]) -> npt.NDArray[np.float32]:
    """The number in [0, 1) of each stream at a token position: a function of nothing else (splitmix64)."""
    bits = _mix(stream + (position.astype(np.uint64) + np.uint64(1)) * _GAMMA)
    return ((bits >> np.uint64(41)).astype(np.float64) * 2.0**-23).astype(np.float32)


def draw(logits: Tensor, uniform: Tensor, params: RowParams) -> tuple[Tensor, Tensor]:
    """Token ids [rows] and their log-probabilities [rows], fp32, under the distribution drawn from.

    `logits` [rows, vocabulary], `uniform` [rows, 1] in [0, 1). Inverse transform sampling: the first token whose
    cumulative probability exceeds `uniform`, found by block and then within it.
    """
    if params.all_greedy:
        x = logits.float()
        best, token = x.max(dim=-1)
        return token, best - torch.logsumexp(x, dim=-1)
    rows, size = logits.shape
    weight = logits.new_zeros((rows, -(-size // BLOCK) * BLOCK), dtype=torch.float32)
    x = torch.div(logits, params.temperature, out=weight[:, :size])
    if params.min_p is not None:
        least = x.amax(dim=-1, keepdim=True) + params.min_p.log()
        x.masked_fill_(x < least, -torch.inf)
    if params.top_k is not None or params.top_p is not None:
        x.copy_(truncate(x, params.top_k, params.top_p))
    greedy = None if params.greedy is None else x.argmax(dim=-1, keepdim=True)
    x.sub_(x.amax(dim=-1, keepdim=True)).exp_()
    blocks = weight.view(rows, -1, BLOCK)
    sums = blocks.sum(dim=-1)
    block, rest = _search(sums, uniform * sums.sum(dim=-1, keepdim=True))
    within, _ = _search(blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK))[:, 0], rest)
    token = block * BLOCK + within
    if greedy is not None:
        token = torch.where(params.greedy, greedy, token)
    logprob = torch.log(weight.gather(1, token) / sums.sum(dim=-1, keepdim=True))
    return token.squeeze(1), logprob.squeeze(1)


def _search(weight: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """First column by row at which the cumulative weight exceeds the threshold, and the threshold left within it.

    Rounding never leads to a column of weight zero: the threshold is kept in [0, total).
    """
    cumulative = weight.cumsum(dim=-1)
    threshold = threshold.clamp(min=0).minimum(cumulative[:, -1:] * (1 - 2.0**-23))
    column = torch.searchsorted(cumulative, threshold, right=True)
    return column, threshold - (cumulative.gather(1, column) - weight.gather(1, column))


def truncate(x: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Set what top-k and then top-p leave out to -inf. `top_k` [rows, 1] (0: all), `top_p` [rows, 1] (1: all)."""
    ordered, index = x.sort(dim=-1, descending=True)
    if top_k is not None:
        rank = torch.arange(x.shape[-1], device=x.device)
        ordered = ordered.masked_fill((rank >= top_k) & (top_k > 0), -torch.inf)
    if top_p is not None:
        p = ordered.softmax(dim=-1)
        before = p.cumsum(dim=-1) - p
        ordered = ordered.masked_fill((before >= top_p) & (top_p < 1), -torch.inf)
    return torch.empty_like(x).scatter_(1, index, ordered)


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        z = (z ^ (z >> _SHIFTS[0])) * _MIX[0]
        z = (z ^ (z >> _SHIFTS[1])) * _MIX[1]
    return z ^ (z >> _SHIFTS[2])
