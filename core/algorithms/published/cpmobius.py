"""CPMobius (arXiv 2602.02979): a coach sets problems, a player solves them, and each has its own reward.

Player: GRPO over its answers to one problem, A = (r - mean) / std, for problems that it solves with a rate of 0.2 to
0.8. Coach: A = (r - mean) / std over the problems that it has set from one prompt. The roles are named `coach` and
`player`.
"""

from __future__ import annotations

from cotune.algorithms.recipes import Attribution, Filters, LossSpec, Recipe, Term

RECIPE = Recipe(
    name="cpmobius",
    plan="independent",
    terms=(Term(key=("task", "role", "branch"), attribution=Attribution(outcome=True, seats=True)),),
    filters=Filters(mean_range=(0.2, 0.8), mean_range_roles=("player",)),
    loss=LossSpec(aggregation="sequence_mean"),
)
