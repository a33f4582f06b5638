"""SWEET-RL (arXiv 2503.15478): a critic that sees the reference solution gives every turn its own advantage.

The critic reads the task's `reference`, which the policy does not see, before the prompt of each turn (section 4.3).
The reward of a turn is that of it and all later ones (gamma 1, section 4.1), with the outcome; GAE, clip 0.2. The
paper's critic learns the advantage of a turn from pairs of episodes (equations 2 and 3), and its policy by DPO
(equation 4).
"""

from __future__ import annotations

from cotune.algorithms.recipes import Attribution, LossSpec, Recipe, Term

RECIPE = Recipe(
    name="sweet_rl",
    plan="independent",
    terms=(Term(key=("task", "role"), attribution=Attribution(horizon="reward_to_go"), baseline="none", scale="none"),),
    loss=LossSpec(critic=True, critic_sees="reference"),
)
