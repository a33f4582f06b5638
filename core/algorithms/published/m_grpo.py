"""M-GRPO (arXiv 2511.13288): a main agent and its sub-agents, each compared within its role.

Main agent: r = 0.1 format + 0.9 correct (equation 4). Sub-agent: r = 0.1 format + 0.4 correct (of the main agent's
answer) + 0.5 judge (of its own work; equation 5). A reply of the wrong format earns nothing. A = (r - mean) / std over
the role's calls of a task (equations 10 and 13), one ratio per response (equations 14 and 16, as GSPO), and every
episode gives a sub-agent the same number of calls, at most 8 (equation 11).
"""

from __future__ import annotations

from cotune.algorithms.recipes import Attribution, Filters, LossSpec, Recipe, Term

RECIPE = Recipe(
    name="m_grpo",
    plan="independent",
    terms=(
        Term(
            key=("task", "role"),
            attribution=Attribution(
                weights={"format": 0.1, "correct": 0.4, "judge": 0.5, "main/correct": 0.9},
                other=0.0,
                gates=("format",),
                outcome=True,
            ),
        ),
    ),
    filters=Filters(align_to=8),
    loss=LossSpec(ratio="sequence", clip_low=3e-4, clip_high=4e-4, aggregation="sequence_mean"),
)
