"""GiGPO (arXiv 2505.10978): groups of episodes, and within them groups of steps that start from one state.

A = A_E + omega A_S (equation 8), omega = 1. A_E = (R - mean) / std of the outcomes of a task's episodes (equation 3).
A_S = (G_t - mean) / std (equation 7) of the discounted returns G_t = sum over k >= t of 0.95^(k - t) r_k (equation 5)
of all steps that saw the same anchor state (equation 6), here the last message of the prompt, in the same role. A step
whose state nobody else saw has A_S = 0.
"""

from __future__ import annotations

from cotune.algorithms.recipes import Attribution, LossSpec, Recipe, Term

RECIPE = Recipe(
    name="gigpo",
    plan="independent",
    terms=(
        Term(key=("task",), attribution=Attribution(horizon="terminal"), unit="trajectory"),
        Term(key=("task", "role", "observation"), attribution=Attribution(horizon="reward_to_go", gamma=0.95)),
    ),
    loss=LossSpec(aggregation="sequence_mean"),
)
