"""DART (arXiv 2509.23866): step-wise GRPO on the steps that were decided with the most entropy.

A = (R - mean) / std over all steps of a task's episodes, R the outcome of the step's own. The 80% of them with the
highest mean token entropy are trained on. Each token weighs min(pi_old / pi_sampler, 1).
"""

from __future__ import annotations

from cotune.algorithms.recipes import Attribution, Filters, LossSpec, Recipe, Term

RECIPE = Recipe(
    name="dart",
    plan="independent",
    terms=(Term(key=("task",), attribution=Attribution(horizon="terminal")),),
    filters=Filters(top_entropy=0.8),
    loss=LossSpec(clip_high=0.28, tis_cap=1.0),
)
