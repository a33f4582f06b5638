"""What tokens cost."""

from __future__ import annotations

from collections.abc import Mapping

Prices = Mapping[str, tuple[float, float]]
"""Money for a million tokens of prompts and of completions, by the name of a model, or of a policy."""


def money(price: tuple[float, float], prompt: float, completion: float) -> float:
    """What so many tokens of prompts and completions cost at a price of `Prices`."""
    return (prompt * price[0] + completion * price[1]) / 1_000_000
