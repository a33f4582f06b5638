"""Advantage Alignment (arXiv 2406.14662) with the group-relative baseline for language models (arXiv 2511.19405).

A_t = R_t - mean of the others' R_t, over the episodes of one task by role and turn, with R_t = r_t + 0.96 R_(t+1). Then
A*_t = A_t + 2 (sum over k < t of 0.96^(t - k) A_k) B_t, B_t the other player's advantage at turn t (`shaping`). Token
clip, truncated importance sampling at 2.
"""

from __future__ import annotations

from cotune.algorithms.recipes import Attribution, Recipe, Shaping, Term

RECIPE = Recipe(
    name="advantage_alignment",
    plan="independent",
    terms=(
        Term(
            key=("task", "role", "turn"),
            attribution=Attribution(horizon="reward_to_go", gamma=0.96, seats=True),
            baseline="leave_one_out",
            scale="none",
        ),
    ),
    shaping=Shaping(opponent=2.0, opponent_gamma=0.96),
)
