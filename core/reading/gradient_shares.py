"""Roles that hold most of the gradient of a policy that several roles share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

MOST = 0.8
"""The share of the gradient above which a role is named."""
WINDOW = 5
"""Steps whose mean share is compared with `MOST`, at least: in a single step the roles' groups may differ by chance."""

Shares = Mapping[str, float]
"""The `gradient_share` of roles in a step."""


def shares_of(roles: Mapping[str, Mapping[str, float]]) -> Shares:
    """The shares in a step's figures by role. Roles that share no policy have none."""
    return {role: figures["gradient_share"] for role, figures in roles.items() if "gradient_share" in figures}


def dominant_roles(steps: Sequence[Shares]) -> dict[str, float]:
    """The roles whose mean share over these steps is above `MOST`, with this mean.

    Steps in which a role has no share do not count for it. A role with a share in fewer than `WINDOW` steps is not
    named.
    """
    shares_by_role: defaultdict[str, list[float]] = defaultdict(list)
    for step in steps:
        for role, share in step.items():
            shares_by_role[role].append(share)
    dominant: dict[str, float] = {}
    for role, shares in shares_by_role.items():
        mean = sum(shares) / len(shares)
        if len(shares) >= WINDOW and mean > MOST:
            dominant[role] = mean
    return dominant
