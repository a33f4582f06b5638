"""REINFORCE++ (arXiv 2501.03262): advantages normalised over the whole batch, without and with a baseline by task.

`reinforce_pp`: A = (r - mean) / std over all tokens of the batch (equation 5 of its version 9), less beta
(log pi_old - log pi_ref) per token (equation 4), beta 0.01. `reinforce_pp_baseline` (section 3.2): A' = r - mean over
the episodes of a task, then A = A' / std of A' over the batch; its mean there is 0 already, as it is within each task.
Both: PPO's token clip 0.2. A batch is all that a policy does in a step.
"""

from __future__ import annotations

from cotune.algorithms.recipes import Attribution, LossSpec, Recipe, Term

RECIPE = Recipe(
    name="reinforce_pp",
    plan="independent",
    terms=(Term(key=("policy",), attribution=Attribution(horizon="terminal"), unit="token", ddof=0),),
    loss=LossSpec(kl=0.01, kl_in="reward"),
)
WITH_BASELINE = Recipe(
    name="reinforce_pp_baseline",
    plan="independent",
    terms=(
        Term(
            key=("task",),
            attribution=Attribution(horizon="terminal"),
            unit="trajectory",
            scale_key=("policy",),
            ddof=0,
        ),
    ),
)
