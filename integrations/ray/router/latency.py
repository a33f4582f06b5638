"""How fast engines answer, and which of them are many times slower than the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median

MIN_ANSWERS = 5
"""An engine with fewer answers is not judged, nor are others by it."""


class Pace:
    """The last answers of one engine: seconds per token of the longest candidate, and seconds in all."""

    def __init__(self, window: int = 16) -> None:
        self._per_token: deque[float] = deque(maxlen=window)
        self._seconds: deque[float] = deque(maxlen=window)

    def add(self, seconds: float, tokens: int) -> None:
        """An answer took so many seconds; its longest candidate has so many tokens (1 when it never came)."""
        self._per_token.append(seconds / max(tokens, 1))
        self._seconds.append(seconds)

    @property
    def known(self) -> bool:
        return len(self._seconds) >= MIN_ANSWERS

    @property
    def per_token(self) -> float:
        return median(self._per_token)

    @property
    def seconds(self) -> float:
        return median(self._seconds)


def slow(paces: Mapping[str, Pace], factor: float, seconds: float) -> dict[str, str]:
    """Names of slow engines, with the figures that say so.

    Slow is an engine whose median request takes `seconds` or longer, at `factor` times the others' median per token.
    """
    known = {name: pace for name, pace in paces.items() if pace.known}
    found = {}
    for name, pace in known.items():
        others = [other.per_token for key, other in known.items() if key != name]
        if others and pace.seconds >= seconds and pace.per_token >= factor * median(others):
            found[name] = (
                f"it takes {pace.per_token:.3g} s per token, the others {median(others):.3g} s "
                f"(a median request of it: {pace.seconds:.3g} s)"
            )
    return found
