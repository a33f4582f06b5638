"""Colours of candidates: by advantage as a whole, or token by token, as text if the run's tokenizer can be read."""

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
"""What candidates are coloured by, and its name."""
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
"""For each colouring a sentence, and its colours with what they mean."""
MOST_TOKENS = 40_000
"""Tokens that one page colours."""
_LEVELS = (0.1, 0.5, 1.0, 2.0, 4.0)
"""Nats at which the colour changes."""
_CONTEXT = 8
"""Tokens before one that its text is told apart with: some are half a character."""


class ShownToken(msgspec.Struct, frozen=True):
    """A token: its text (its id where no tokenizer is known), the figure that colours it (None where it has none), and
    its colour."""

    text: str
    value: float | None
    colour: str


class ColouredTokens(msgspec.Struct, frozen=True):
    """The first tokens of a candidate; `as_text` says whether they are text, `left_out` how many follow."""

    tokens: tuple[ShownToken, ...]
    as_text: bool
    left_out: int


class Colouring:
    """Colours the candidates of a page, at most `MOST_TOKENS` tokens of them."""

    def __init__(self, by: str, model: str = "", figures: TokenFigures | None = None) -> None:
        self.by = by if by in COLOURS else ""
        self.left = MOST_TOKENS
        self._model = model
        self._figures = figures

    @property
    def without_figures(self) -> bool:
        """Whether it is by figures of the learner that this step does not have."""
        return self.by in ("entropy", "ratio") and self._figures is None

    def of_candidate(self, advantage: float | None) -> str:
        """The colour of a whole candidate; empty for none."""
        if self.by != "advantage" or advantage is None:
            return ""
        return "t0" if advantage == 0 else f"t-{'p' if advantage > 0 else 'n'}{1 + (abs(advantage) > 1)}"

    def of_tokens(self, candidate: Candidate, id: str) -> ColouredTokens | None:
        """The tokens of a candidate with their colours; None where it has no figures, or the page has enough tokens."""
        values = self._values(candidate, id)
        if not values or not self.left:
            return None
        count = min(len(values), self.left)
        self.left -= count
        ids = candidate.token_ids[:count]
        texts = _texts(ids, _tokenizer(self._model))
        names = texts if texts is not None else list(map(str, ids))
        shown = tuple(ShownToken(name, value, self._colour(value)) for name, value in zip(names, values, strict=False))
        return ColouredTokens(shown, texts is not None, len(values) - count)

    def _values(self, candidate: Candidate, id: str) -> Sequence[float | None]:
        logprobs = candidate.logprobs
        if self.by in ("", "advantage") or not logprobs or len(logprobs) != len(candidate.token_ids):
            return ()
        if self.by == "logprob":
            return logprobs
        found = self._figures.of(id) if self._figures else None
        if found is None or len(found.gaps) != len(logprobs):
            return ()
        return list(map(_finite, found.entropies if self.by == "entropy" else np.exp(found.gaps.astype(float))))

    def _colour(self, value: float | None) -> str:
        if value is None:
            return "t0"
        if self.by == "ratio":
            levels = sum(value > level for level in (0.8, 0.98, 1.02, 1.25))
            return ("t-n2", "t-n1", "t0", "t-p1", "t-p2")[levels]
        size = -value if self.by == "logprob" else value
        return f"t{sum(not size <= level for level in _LEVELS) if math.isfinite(size) else len(_LEVELS)}"


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


@functools.lru_cache(2)
def _tokenizer(model: str) -> Any:
    """The tokenizer of a model folder; None where the model lies elsewhere or the package is missing."""
    file = Path(model) / "tokenizer.json"
    if not model or not file.is_file():
        return None
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        return None
    return Tokenizer.from_file(str(file))


def _texts(ids: Sequence[int], tokenizer: Any) -> list[str] | None:
    """The text that each token adds to those before it; None without a tokenizer."""
    if tokenizer is None:
        return None
    starts = [max(0, place - _CONTEXT) for place in range(len(ids))]
    before = [list(ids[start:place]) for place, start in enumerate(starts)]
    until = [list(ids[start : place + 1]) for place, start in enumerate(starts)]
    decoded = tokenizer.decode_batch([*before, *until], skip_special_tokens=False)
    return [
        (whole[len(first) :] if whole.startswith(first) else whole) or tokenizer.id_to_token(id) or ""
        for first, whole, id in zip(decoded[: len(ids)], decoded[len(ids) :], ids, strict=True)
    ]
