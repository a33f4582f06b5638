"""Draws the next token of every row of a batch. Each row has its parameters and its random stream, and a grammar, token
biases and penalties may change its logits before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cotune.integrations.models.chat.grammar import Grammars, Matcher
from cotune.integrations.models.device_copies import to_device
from cotune.sampling.protocol import SamplingParams


def changes_logits(params: SamplingParams) -> bool:
    """Whether a parameter other than temperature and truncation changes the distribution."""
    has_penalty = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0 or params.repetition_penalty != 1.0
    return has_penalty or bool(params.logit_bias or params.grammar)


class LogitChanges:
    """A row whose logits are changed: the state of its grammar, and the number of times that each token was drawn."""

    def __init__(self, prompt: Sequence[int], params: SamplingParams, grammars: Grammars | None) -> None:
        """The state of one sequence whose logits are changed before a token is drawn: by a grammar, by biases of single
        tokens, or by penalties for tokens that occurred before.
        """
        self.matcher: Matcher | None = grammars.start(params.grammar) if grammars and params.grammar else None
        self.bias = params.logit_bias
        self.repetition = params.repetition_penalty
        self.frequency = params.frequency_penalty
        self.presence = params.presence_penalty
        self._counts: Counter[int] = Counter()
        self._prompt = frozenset(prompt) if self.repetition != 1.0 else frozenset()

    def consume(self, token: int) -> bool:
        """Record a drawn token. Returns False if the grammar's matcher refuses it, although it had allowed it."""
        self._counts[token] += 1
        return self.matcher is None or self.matcher.consume(token)

    def penalized_as_repeated(self) -> frozenset[int]:
        """The tokens with a repetition penalty: unlike the other penalties, it counts the tokens of the prompt too."""
        return self._prompt.union(self._counts) if self.repetition != 1.0 else frozenset()

    def penalties(self) -> dict[int, float]:
        """By drawn token, the number that frequency and presence penalties subtract from its logit."""
        if not (self.frequency or self.presence):
            return {}
        frequency, presence = np.float32(self.frequency), np.float32(self.presence)
        return {token: float(frequency * np.float32(count) + presence) for token, count in self._counts.items()}


class _LogitEntries:
    """Single logits of a batch, by row and token, and a number for each."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._tokens: list[int] = []
        self._numbers: list[float] = []

    def add(self, row: int, tokens: Collection[int], numbers: Collection[float]) -> None:
        self._rows += [row] * len(tokens)
        self._tokens += tokens
        self._numbers += numbers

    def __bool__(self) -> bool:
        return bool(self._rows)

    def copy_to(self, logits: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Copy the entries to the device of the logits: the indices of rows and tokens, and the numbers."""
        rows, tokens = to_device(np.array([self._rows, self._tokens]), logits.device)
        numbers = to_device(np.array(self._numbers, np.float32), logits.device)
        return (rows, tokens), numbers.to(logits.dtype)


def change_logits(logits: Tensor, rows: Sequence[LogitChanges | None]) -> None:
    """Change `logits` [rows, vocabulary] in place by the grammars, biases and penalties of the rows. Tokens that a
    grammar forbids get -inf. `rows` has None for a row without changes.
    """
    matchers = {i: row.matcher for i, row in enumerate(rows) if row is not None and row.matcher is not None}
    if matchers:
        words = next(iter(matchers.values())).words
        bits = np.empty((len(matchers), words), np.int32)
        for matcher, bits_of_row in zip(matchers.values(), bits, strict=True):
            matcher.allowed(bits_of_row)  # writes one bit for each token
        allowed = np.unpackbits(bits.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
        forbidden = to_device(allowed == 0, logits.device)  # [matchers, vocabulary]
        if len(matchers) == len(rows):
            logits.masked_fill_(forbidden, -torch.inf)  # in place, without a copy of the rows
        else:
            index = to_device(np.array(list(matchers)), logits.device)
            logits[index] = logits[index].masked_fill(forbidden, -torch.inf)
    _apply_biases_and_penalties(logits, rows)


def _apply_biases_and_penalties(logits: Tensor, rows: Sequence[LogitChanges | None]) -> None:
    """Apply the biases and penalties of the rows to `logits` [rows, vocabulary], in place.

    The host collects those of all rows first: a copy to a GPU for each row would take longer than the changes.
    """
    biases = _LogitEntries()
    repetitions = _LogitEntries()
    penalties = _LogitEntries()
    for number, row in enumerate(rows):
        if row is None:
            continue
        biases.add(number, [token for token, _ in row.bias], [bias for _, bias in row.bias])
        repeated = row.penalized_as_repeated()
        repetitions.add(number, repeated, [row.repetition] * len(repeated))
        penalty_of_token = row.penalties()
        penalties.add(number, penalty_of_token.keys(), penalty_of_token.values())

    if biases:
        at, added = biases.copy_to(logits)
        logits[at] += added
    if repetitions:
        at, factors = repetitions.copy_to(logits)
        repeated_logits = logits[at]
        logits[at] = torch.where(repeated_logits > 0, repeated_logits / factors, repeated_logits * factors)
    if penalties:
        at, subtracted = penalties.copy_to(logits)
        logits[at] -= subtracted


_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))

BLOCK = 64
"""Number of tokens whose weights are summed together. Two short searches replace one over the whole vocabulary."""


class RowParams(NamedTuple):
    """Sampling parameters of the rows, in tensors [rows, 1]; None if no row needs the parameter."""

    temperature: Tensor
    """It is 1 for greedy rows, whose log-probabilities are those of the unchanged model."""
    greedy: Tensor | None
    all_greedy: bool
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None = None
    top: npt.NDArray[np.int64] | None = None
    """The number of likeliest tokens that are reported, [rows]."""

    def rows(self, which: slice | Tensor) -> RowParams:
        """The parameters of the rows `which`, to draw from these rows alone. Drawing does not use `top`, so it is left
        out.
        """
        return RowParams(
            temperature=self.temperature[which],
            greedy=None if self.greedy is None else self.greedy[which],
            all_greedy=self.all_greedy,
            top_k=None if self.top_k is None else self.top_k[which],
            top_p=None if self.top_p is None else self.top_p[which],
            min_p=None if self.min_p is None else self.min_p[which],
        )


def random_streams(seed: int, n: int) -> npt.NDArray[np.uint64]:
    """Make one random stream for each candidate of a request."""
    root = _mix_bits(np.array([seed % 2**64], np.uint64))
    return _mix_bits(root ^ (np.arange(n, dtype=np.uint64) * _GAMMA))


def uniforms(stream: npt.NDArray[np.uint64], position: npt.NDArray[np.integer]) -> npt.NDArray[np.float32]:
    """The number in [0, 1) of each stream at a token position. It depends only on these two (splitmix64)."""
    bits = _mix_bits(stream + (position.astype(np.uint64) + np.uint64(1)) * _GAMMA)
    return ((bits >> np.uint64(41)).astype(np.float64) * 2.0**-23).astype(np.float32)


def draw(logits: Tensor, uniform: Tensor, params: RowParams) -> tuple[Tensor, Tensor]:
    """Draw token ids [rows], and give their log-probabilities [rows], fp32, in the distribution after truncation.

    `logits` are [rows, vocabulary], and `uniform` [rows, 1] is in [0, 1). By inverse transform sampling, the first
    token is drawn whose cumulative probability exceeds `uniform`. Its block is searched first, then the token in it.
    """
    if params.all_greedy:
        wide_logits = logits.float()
        best_logit, token = wide_logits.max(dim=-1)
        return token, best_logit - torch.logsumexp(wide_logits, dim=-1)
    weight, greedy_token = _draw_weights(logits, params)
    blocks = weight.view(len(logits), -1, BLOCK)  # [rows, blocks, BLOCK]
    block_sums = blocks.sum(dim=-1)
    total = block_sums.sum(dim=-1, keepdim=True)
    block, threshold_in_block = _find_column(block_sums, uniform * total)
    weights_in_block = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK))[:, 0]  # [rows, BLOCK]
    position_in_block, _ = _find_column(weights_in_block, threshold_in_block)
    token = block * BLOCK + position_in_block  # [rows, 1]
    if greedy_token is not None:
        token = torch.where(params.greedy, greedy_token, token)
    logprob = torch.log(weight.gather(1, token) / total)
    return token.squeeze(1), logprob.squeeze(1)


def likeliest(logits: Tensor, params: RowParams, most: int) -> tuple[Tensor, Tensor]:
    """The `most` likeliest tokens of each row and their log-probabilities, [rows, most], in the same distribution as in
    `draw`. Tokens that cannot be drawn have -inf. A small vocabulary has fewer tokens."""
    vocabulary = logits.shape[1]
    n_tokens = min(most, vocabulary)
    if params.all_greedy:
        wide_logits = logits.float()
        best_logits, tokens = wide_logits.topk(n_tokens, dim=-1)
        return tokens, best_logits - torch.logsumexp(wide_logits, dim=-1, keepdim=True)
    weights, _ = _draw_weights(logits, params)
    # Summed block by block, as `draw` does: another order would round differently.
    total = weights.view(len(logits), -1, BLOCK).sum(dim=-1).sum(dim=-1, keepdim=True)
    # Without the padding that fills the last block.
    best_weights, tokens = weights[:, :vocabulary].topk(n_tokens, dim=-1)
    return tokens, torch.log(best_weights / total)


def _draw_weights(logits: Tensor, params: RowParams) -> tuple[Tensor, Tensor | None]:
    """The weights with which tokens are drawn, and the likeliest tokens.

    The weights are the probabilities up to a factor, in float32, [rows, vocabulary padded to whole blocks]; the padding
    is 0. The likeliest tokens, [rows, 1], are the ones that greedy rows take; None if no row is greedy.
    """
    rows, vocabulary = logits.shape
    blocks = -(-vocabulary // BLOCK)
    weights = logits.new_empty((rows, blocks * BLOCK), dtype=torch.float32)
    weights[:, vocabulary:] = 0.0
    # A view of `weights`, which the last line turns from scaled logits into weights in place, to save memory.
    scaled_logits = torch.div(logits, params.temperature, out=weights[:, :vocabulary])
    if params.min_p is not None:
        least_logit = scaled_logits.amax(dim=-1, keepdim=True) + params.min_p.log()
        scaled_logits.masked_fill_(scaled_logits < least_logit, -torch.inf)
    if params.top_k is not None or params.top_p is not None:
        scaled_logits.copy_(truncate(scaled_logits, params.top_k, params.top_p))
    greedy_token = None if params.greedy is None else scaled_logits.argmax(dim=-1, keepdim=True)
    scaled_logits.sub_(scaled_logits.amax(dim=-1, keepdim=True)).exp_()
    return weights, greedy_token


def _find_column(weight: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """Find in each row the first column whose cumulative weight exceeds the threshold, and the threshold within it.

    Rounding must never lead to a column with weight zero, so the threshold is limited to [0, total). A GPU adds in
    another order and rounds its sums up and down, so a column with weight zero gets the greatest sum before it.
    """
    cumulative = weight.cumsum(dim=-1).masked_fill_(weight == 0, 0.0).cummax(dim=-1).values
    below_total = cumulative[:, -1:] * (1 - 2.0**-23)  # one step of float32
    limited = threshold.clamp(min=0).minimum(below_total)
    column = torch.searchsorted(cumulative, limited, right=True)
    weight_before_column = cumulative.gather(1, column) - weight.gather(1, column)
    return column, limited - weight_before_column


def truncate(x: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Set the logits of tokens that top-k and then top-p exclude to -inf. The likeliest token is never excluded.
    `top_k` is [rows, 1] (0 for all tokens), and `top_p` [rows, 1] (1 for all)."""
    ordered, index = x.sort(dim=-1, descending=True)
    if top_k is not None:
        rank = torch.arange(x.shape[-1], device=x.device)
        ordered = ordered.masked_fill((rank >= top_k) & (top_k > 0), -torch.inf)
    if top_p is not None:
        p = ordered.softmax(dim=-1)
        likelier = p.cumsum(dim=-1) - p  # the probability of all tokens that are likelier
        likelier[..., 0] = -1.0  # never excluded, even if top_p is 0
        ordered = ordered.masked_fill((likelier >= top_p) & (top_p < 1), -torch.inf)
    return torch.empty_like(x).scatter_(1, index, ordered)


def _mix_bits(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        z = (z ^ (z >> _SHIFTS[0])) * _MIX[0]
        z = (z ^ (z >> _SHIFTS[1])) * _MIX[1]
    return z ^ (z >> _SHIFTS[2])
