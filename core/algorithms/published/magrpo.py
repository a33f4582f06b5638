"""MAGRPO (arXiv 2508.04652): roles that answer for one joint reward, compared turn by turn.

R_t = r_t + gamma R_(t+1), r_t the joint reward of turn t; A_t = R_t - mean of R_t over the group's episodes, by role;
the loss is -A_t log pi(a_t | h_t), without ratio, standard deviation or KL. gamma 0.9 is that of the authors' code.
"""

from __future__ import annotations

from cotune.algorithms.recipes import Attribution, LossSpec, Recipe, Term

RECIPE = Recipe(
    name="magrpo",
    plan="independent",
    terms=(
        Term(
            key=("task", "role", "turn"),
            attribution=Attribution(horizon="reward_to_go", gamma=0.9, scope="mean"),
            scale="none",
        ),
    ),
    loss=LossSpec(ratio="none", aggregation="constant"),
)
