"""Colours candidates by a figure: a whole candidate by its advantage, or each token by a figure of its own.

Tokens are shown as text if the tokenizer of the run can be read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from cotune.records.structs import Candidate
from cotune.storage.token_figures import TokenFigures

COLOURS = {
    "": "nothing",
    "advantage": "advantage",
    "logprob": "log-probability",
    "entropy": "entropy",
    "ratio": "learner/sampler ratio",
}
"""Figure that candidates are coloured by -> its name."""
LEGENDS = {
    "advantage": (
        "Advantage, as the update weighed it:",
        (("t-n2", "below -1"), ("t-n1", "below 0"), ("t0", "0"), ("t-p1", "above 0"), ("t-p2", "above 1")),
    ),
    "logprob": (
        "Log-probability by the sampler, in nats:",
        tuple((f"t{level}", text) for level, text in enumerate(("above -0.1", "-0.5", "-1", "-2", "-4", "below"))),
    ),
    "entropy": (
        "Entropy of the policy in the first pass of the update, in nats:",
        tuple((f"t{level}", text) for level, text in enumerate(("below 0.1", "0.5", "1", "2", "4", "above"))),
    ),
    "ratio": (
        "Probability by the learner, in the first pass of the update, over that by the sampler:",
        (
            ("t-n2", "below 0.8"), ("t-n1", "below 0.98"), ("t0", "about 1"), ("t-p1", "above 1.02"),
            ("t-p2", "above 1.25"),
        ),
    ),
}  # fmt: skip
"""Figure -> a sentence on it, and its colours with their meanings."""
MOST_TOKENS = 40_000
"""Most tokens that one page colours."""
_LEVELS = (0.1, 0.5, 1.0, 2.0, 4.0)
"""Values, in nats, between which the colour changes."""
_RATIO_LEVELS = (0.8, 0.98, 1.02, 1.25)
_RATIO_CLASSES = ("t-n2", "t-n1", "t0", "t-p1", "t-p2")
"""Ratios of probabilities between which the colour changes, and the CSS classes below, between and above them."""
_CONTEXT = 8
"""Number of tokens that are decoded before a token to get its text. A token may be only a part of a character."""


class ShownToken(msgspec.Struct, frozen=True):
    """A token."""

    text: str
    """Its text, or its id without a tokenizer."""
    value: float | None
    """The figure that colours it; None if it has none."""
    colour: str


class ColouredTokens(msgspec.Struct, frozen=True):
    """The first tokens of a candidate. `as_text`: they are shown as text. `left_out` more tokens follow."""

    tokens: tuple[ShownToken, ...]
    as_text: bool
    left_out: int


class Colouring:
    """Colours the candidates of a page, at most `MOST_TOKENS` tokens of them."""

    def __init__(self, by: str, model: str = "", figures: TokenFigures | None = None) -> None:
        self.by = by if by in COLOURS else ""
        self.tokens_left = MOST_TOKENS
        self._model = model
        self._figures = figures

    @property
    def without_figures(self) -> bool:
        """Whether it needs figures of the learner that this step does not have."""
        return self.by in ("entropy", "ratio") and self._figures is None

    def of_candidate(self, advantage: float | None) -> str:
        """The CSS class that colours a whole candidate by its advantage; empty if it is not coloured."""
        if self.by != "advantage" or advantage is None:
            return ""
        if advantage == 0:
            return "t0"
        if advantage < 0:
            return "t-n2" if advantage < -1 else "t-n1"
        return "t-p2" if advantage > 1 else "t-p1"

    def of_tokens(self, candidate: Candidate, id: str) -> ColouredTokens | None:
        """The coloured tokens of a candidate; None if it has no figures, or if the page has enough tokens already."""
        values = self._values(candidate, id)
        if not values or not self.tokens_left:
            return None
        count = min(len(values), self.tokens_left)
        self.tokens_left -= count
        ids = candidate.token_ids[:count]
        texts = _texts(ids, _tokenizer(self._model))
        texts_or_ids = texts if texts is not None else list(map(str, ids))
        tokens = []
        for text, value in zip(texts_or_ids, values, strict=False):
            tokens.append(ShownToken(text, value, self._colour(value)))
        return ColouredTokens(tuple(tokens), as_text=texts is not None, left_out=len(values) - count)

    def _values(self, candidate: Candidate, id: str) -> Sequence[float | None]:
        """The number that colours each token of a candidate: its log-probability, its entropy, or the ratio of the
        learner's and the sampler's probabilities. Empty if tokens are not coloured, or if their numbers are missing.
        """
        if self.by in ("", "advantage"):
            return ()
        logprobs = candidate.logprobs
        if not logprobs or len(logprobs) != len(candidate.token_ids):
            return ()
        if self.by == "logprob":
            return logprobs
        # The other numbers come from the learner, which wrote them for the candidates of an update.
        figures = self._figures.of(id) if self._figures else None
        if figures is None or len(figures.gaps) != len(logprobs):
            return ()
        if self.by == "entropy":
            return list(map(_finite, figures.entropies))
        # A gap is a difference of log-probabilities, so its exponential is the ratio of probabilities.
        return list(map(_finite, np.exp(figures.gaps.astype(float))))

    def _colour(self, value: float | None) -> str:
        """The CSS class that colours a token by its number (see `LEGENDS`). A missing number gets the class of small
        ones, and an infinite number the strongest.
        """
        if value is None:
            return "t0"
        if self.by == "ratio":
            levels_below = sum(value > level for level in _RATIO_LEVELS)
            return _RATIO_CLASSES[levels_below]
        nats = -value if self.by == "logprob" else value
        if not math.isfinite(nats):
            return f"t{len(_LEVELS)}"
        levels_below = sum(nats > level for level in _LEVELS)
        return f"t{levels_below}"


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


@functools.lru_cache(2)
def _tokenizer(model: str) -> Any:
    """The tokenizer of a model folder; None if the folder has none or the package is missing."""
    file = Path(model) / "tokenizer.json"
    if not model or not file.is_file():
        return None
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        return None
    return Tokenizer.from_file(str(file))


def _texts(ids: Sequence[int], tokenizer: Any) -> list[str] | None:
    """The text that each token adds to the tokens before it; None without a tokenizer."""
    if tokenizer is None:
        return None
    # The text of a token is the difference between the text with it and the text without it. All are decoded in one
    # batch, which is much faster than one by one.
    ids_before = []
    ids_until = []
    for position in range(len(ids)):
        first = max(0, position - _CONTEXT)
        ids_before.append(list(ids[first:position]))
        ids_until.append(list(ids[first : position + 1]))
    decoded = tokenizer.decode_batch([*ids_before, *ids_until], skip_special_tokens=False)

    texts = []
    for id, text_before, text_until in zip(ids, decoded[: len(ids)], decoded[len(ids) :], strict=True):
        # A token may change the text before it, such as the last byte of a character.
        text = text_until.removeprefix(text_before)
        texts.append(text or tokenizer.id_to_token(id) or "")
    return texts
