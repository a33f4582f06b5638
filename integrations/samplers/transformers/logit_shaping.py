"""What changes the logits of single rows before they are drawn from: a grammar, token biases, penalties."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cotune.integrations.chat.grammar import Grammars, Matcher
from cotune.sampling.protocol import SamplingParams


def is_shaped(params: SamplingParams) -> bool:
    """Whether anything but temperature and truncation changes the distribution."""
    plain = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    return not plain or bool(params.logit_bias or params.grammar)


class Shaped:
    """One row: where its reply stands in its grammar, and how often it has said each token."""

    def __init__(self, prompt: Sequence[int], params: SamplingParams, grammars: Grammars | None) -> None:
        self.matcher: Matcher | None = grammars.start(params.grammar) if grammars and params.grammar else None
        self.bias = params.logit_bias
        self.repetition = params.repetition_penalty
        self.frequency = params.frequency_penalty
        self.presence = params.presence_penalty
        self._counts: Counter[int] = Counter()
        self._prompt = frozenset(prompt) if self.repetition != 1.0 else frozenset()

    def consume(self, token: int) -> None:
        """Go on by the token that was drawn."""
        self._counts[token] += 1
        if self.matcher is not None:
            self.matcher.consume(token)

    def change(self, logits: Tensor) -> None:
        """Apply biases and penalties to the logits [vocabulary] of this row, in place."""
        if self.bias:
            biased = [token for token, _ in self.bias]
            logits[biased] += torch.tensor([v for _, v in self.bias], dtype=logits.dtype, device=logits.device)
        if self.repetition != 1.0 and (said := sorted(self._prompt | set(self._counts))):
            value = logits[said]
            logits[said] = torch.where(value > 0, value / self.repetition, value * self.repetition)
        if (self.frequency or self.presence) and self._counts:
            tokens, counts = list(self._counts), list(self._counts.values())
            penalty = self.frequency * torch.tensor(counts, dtype=torch.float32) + self.presence
            logits[tokens] -= penalty.to(logits)


def shape(logits: Tensor, rows: Sequence[Shaped | None]) -> None:
    """Change `logits` [rows, vocabulary] in place, each row by its own; what a grammar forbids becomes -inf."""
    matchers = {i: row.matcher for i, row in enumerate(rows) if row is not None and row.matcher is not None}
    if matchers:
        bits = np.empty((len(matchers), next(iter(matchers.values())).words), np.int32)
        for at, matcher in enumerate(matchers.values()):
            matcher.allowed(bits[at])
        allowed = np.unpackbits(bits.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
        forbidden = torch.from_numpy(allowed == 0).to(logits.device)
        if len(matchers) == len(rows):
            logits.masked_fill_(forbidden, -torch.inf)
        else:
            index = torch.tensor(list(matchers), device=logits.device)
            logits[index] = logits[index].masked_fill(forbidden, -torch.inf)
    for i, row in enumerate(rows):
        if row is not None:
            row.change(logits[i])
