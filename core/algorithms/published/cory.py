"""CORY (arXiv 2410.06101): a pioneer answers, an observer answers after it, and both earn what both have earned.

r = sum over the two roles of their own rewards (equation 4). PPO with a critic: GAE with gamma 1, lambda 0.95, clip
0.2, KL in the reward (equation 2). The roles exchange their models every few steps (equation 5): `[routing] swap`.
"""

from __future__ import annotations

from cotune.algorithms.recipes import Attribution, LossSpec, Recipe, Term

RECIPE = Recipe(
    name="cory",
    plan="independent",
    terms=(
        Term(
            key=("task", "role"),
            attribution=Attribution(outcome=True, seats=True, scope="sum"),
            baseline="none",
            scale="none",
        ),
    ),
    loss=LossSpec(critic=True, kl=0.01, kl_in="reward"),
)
