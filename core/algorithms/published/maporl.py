"""MAPoRL (arXiv 2502.18439): agents that debate, paid for what the verifier says of their turn and of those after it.

R_t = (sum over t' >= t of gamma^(t' - t) r_t') / (sum over t' >= t of gamma^(t' - t)), then the mean over the agents of
the turn; r_t is the verifier's score with its bonuses, as the scorers return them. PPO with a critic.
"""

from __future__ import annotations

from cotune.algorithms.recipes import Attribution, LossSpec, Recipe, Term

RECIPE = Recipe(
    name="maporl",
    plan="independent",
    terms=(
        Term(
            key=("task", "role"),
            attribution=Attribution(horizon="mean_to_go", gamma=0.9, scope="mean"),
            baseline="none",
            scale="none",
        ),
    ),
    loss=LossSpec(critic=True, kl=0.01, kl_in="reward"),
)
