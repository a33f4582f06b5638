"""Self-RedTeam: attacker and defender of one policy."""

from __future__ import annotations

from cotune.algorithms.methods.reinforce_pp import ReinforcePp
from cotune.algorithms.recipes import Attribution, Filters


class SelfRedTeam(ReinforcePp):
    """Self-RedTeam (arXiv 2506.07468): attacker and defender of one policy play each other.

        A = (R - mean(R)) / (std(R) + 1e-6) over all tokens of the role in the batch

    R is the role's own outcome. Ties are left out. KL in the reward (REINFORCE++ by role).

    Difference: no supervised batch in addition.
    """

    name = "self_redteam"
    group_by = ("role",)
    attribution = Attribution(own=False, outcome=True, seats=True)
    filters = Filters(ties=True)
