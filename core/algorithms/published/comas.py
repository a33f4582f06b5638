"""CoMAS (arXiv 2510.08529): agents that propose, evaluate and score each other, and reward each other by it.

The score of a solution rewards its solver, one minus it the evaluator (equation 7): what the workflow returns by role.
A = (r - mean) / std over all tokens of the policy's batch (equation 10), KL in the reward (equation 9): REINFORCE++.
"""

from __future__ import annotations

from cotune.algorithms.recipes import Attribution, LossSpec, Recipe, Term

RECIPE = Recipe(
    name="comas",
    plan="independent",
    terms=(Term(key=("policy",), attribution=Attribution(outcome=True, seats=True), unit="token", ddof=0),),
    loss=LossSpec(kl=0.01, kl_in="reward"),
)
