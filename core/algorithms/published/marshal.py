"""MARSHAL (arXiv 2510.15414): self-play with an advantage for every turn of every seat.

R_t = sum of the seat's rewards from turn t on (gamma 1), then A_t = R_t - mean of R over all turns of the seat in the
games of a group: first the sum, then the normalisation, by role. PPO with dual clip and KL 0.2. The dual clip at 1 + 2
x 0.2 = 1.4 is that of ROLL, the framework of the authors' code.
"""

from __future__ import annotations

from cotune.algorithms.recipes import Attribution, LossSpec, Recipe, Term

RECIPE = Recipe(
    name="marshal",
    plan="independent",
    terms=(Term(key=("task", "role"), attribution=Attribution(horizon="reward_to_go", seats=True), scale="none"),),
    loss=LossSpec(dual_clip=1.4, kl=0.2, aggregation="trajectory_mean"),
)
