"""The tokens of an answer with their log-probabilities, as text if the run's tokenizer can be read."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from cotune.records.structs import Candidate

LEVELS = (-0.1, -0.5, -1.0, -2.0, -4.0)
"""Log-probabilities, in nats, at which the colour changes."""
_CONTEXT = 8
"""Tokens before one that its text is told apart with: some are half a character."""


class ShownToken(msgspec.Struct, frozen=True):
    """A token: its text (its id where no tokenizer is known), its log-probability, and its colour, 0 for a sure one."""

    text: str
    logprob: float
    level: int


def shown_tokens(candidate: Candidate, model: str) -> tuple[list[ShownToken], bool]:
    """Tokens of a candidate, and whether they are text."""
    texts = _texts(candidate.token_ids, _tokenizer(model))
    known = texts is not None
    names = texts if texts is not None else [str(id) for id in candidate.token_ids]
    return [ShownToken(text, p, _level(p)) for text, p in zip(names, candidate.logprobs, strict=True)], known


def _level(logprob: float) -> int:
    return sum(not logprob >= level for level in LEVELS) if math.isfinite(logprob) else len(LEVELS)


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
    if tokenizer is None:
        return None
    found, shown = [], ""
    for end in range(1, len(ids) + 1):
        start = max(0, end - 1 - _CONTEXT)
        before = tokenizer.decode(list(ids[start : end - 1]), skip_special_tokens=False)
        text = tokenizer.decode(list(ids[start:end]), skip_special_tokens=False)
        shown = text[len(before) :] if text.startswith(before) else text
        found.append(shown or tokenizer.id_to_token(ids[end - 1]) or "")
    return found
