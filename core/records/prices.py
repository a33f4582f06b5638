"""The cost of tokens."""

from __future__ import annotations

from collections.abc import Mapping

Prices = Mapping[str, tuple[float, float]]
"""The price of a million prompt tokens and of a million completion tokens, by the name of a model or a policy."""


def money(price: tuple[float, float], prompt: float, completion: float) -> float:
    """The cost of these numbers of prompt and completion tokens, at a price from `Prices`."""
    return (prompt * price[0] + completion * price[1]) / 1_000_000
