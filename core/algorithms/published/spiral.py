"""SPIRAL (arXiv 2506.24119): self-play on zero-sum games with role-conditioned advantages (RAE).

b <- 0.95 b + 0.05 R for each game and role, then A = R - b (equation 2), R the outcome of the role's own seat. The loss
is -A log pi summed over tokens (equation 3), without ratio, standard deviation or division by the length.
"""

from __future__ import annotations

from cotune.algorithms.recipes import Attribution, Filters, LossSpec, Recipe, Term

RECIPE = Recipe(
    name="spiral",
    plan="independent",
    terms=(Term(key=("role",), attribution=Attribution(horizon="terminal", seats=True), baseline="ema", scale="none"),),
    filters=Filters(zero_advantage=True),
    loss=LossSpec(ratio="none", aggregation="constant"),
)
