"""Chain-of-Agents, stage 2 (AFM-RL, arXiv 2508.13167): DAPO on the rollouts of one policy that plays all roles.

r = answer x format, both 0 or 1: an answer of the wrong format earns nothing (equation 11, of agents that write code;
for web agents equation 10 has the answer alone). A = (r - mean) / std over the episodes of a task, tasks without
variance are left out, clip 0.2 / 0.28, token mean. Use it with `policies = "shared"`.
"""

from __future__ import annotations

from cotune.algorithms.recipes import Attribution, Filters, LossSpec, Recipe, Term

RECIPE = Recipe(
    name="afm_rl",
    plan="independent",
    terms=(Term(key=("task",), attribution=Attribution(horizon="terminal", gates=("format",)), unit="trajectory"),),
    filters=Filters(zero_variance=True),
    loss=LossSpec(clip_high=0.28),
)
