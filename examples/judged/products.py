"""The products that need names."""

from __future__ import annotations

PRODUCTS = ["soap", "tea", "a lamp", "shoes", "jam", "a clock", "paper", "honey"]


def make_tasks(n: int, seed: int = 0) -> list[dict[str, str]]:
    """The first `n` products, from number `seed` on."""
    chosen = [PRODUCTS[(seed + i) % len(PRODUCTS)] for i in range(n)]
    return [{"id": product, "product": product} for product in chosen]
