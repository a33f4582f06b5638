"""MMedAgent-RL (arXiv 2506.00555): GRPO by role on a curriculum, with an entropy bonus that differs by sample.

r = format + accuracy, A = (r - mean) / std over the role's calls of a task. The weight of the entropy is 0.01 times the
component `exploration` of the episode's outcome: low where the specialists agree and are right, high where they
contradict each other or are wrong. The curriculum, easy to hard, is `[curriculum] by`.
"""

from __future__ import annotations

from cotune.algorithms.recipes import Attribution, LossSpec, Recipe, Term

RECIPE = Recipe(
    name="mmedagent_rl",
    plan="independent",
    terms=(Term(key=("task", "role"), attribution=Attribution(weights={"exploration": 0.0}, outcome=True)),),
    loss=LossSpec(entropy=0.01, entropy_by="exploration", aggregation="sequence_mean"),
)
