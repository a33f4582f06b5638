"""Self-RedTeam (arXiv 2506.07468): attacker and defender of one policy play each other.

Each role has its own outcome. Ties are left out. A = (r - mean) / std over all tokens of the role in the batch, KL in
the reward (REINFORCE++ by role).
"""

from __future__ import annotations

from cotune.algorithms.recipes import Attribution, Filters, LossSpec, Recipe, Term

RECIPE = Recipe(
    name="self_redteam",
    plan="independent",
    terms=(Term(key=("role",), attribution=Attribution(horizon="terminal", seats=True), unit="token", ddof=0),),
    filters=Filters(ties=True),
    loss=LossSpec(kl=0.01, kl_in="reward"),
)
