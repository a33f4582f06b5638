"""On-policy distillation (arXiv 2306.13649, with reverse KL): the policy samples, a teacher scores each sampled token.

A_t = log pi_teacher(y_t) - log pi_old(y_t): minus the one-sample estimate of the reverse KL of token t, whose policy
gradient is that of KL(pi || pi_teacher) at the states that the policy visits. Rewards count for nothing.
"""

from __future__ import annotations

from cotune.algorithms.recipes import Attribution, LossSpec, Recipe, Term

RECIPE = Recipe(
    name="distill",
    plan="independent",
    terms=(
        Term(key=("task",), attribution=Attribution(horizon="terminal"), baseline="none", scale="none", weight=0.0),
    ),
    loss=LossSpec(kl=1.0, kl_in="reward", kl_to="teacher"),
)
