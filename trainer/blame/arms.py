"""Arms: the ways in which a task is run, by the roles whose answers are swapped to the reference's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

PHASES = "blame "
"""How the phases of an analysis' episodes begin."""


@dataclass(frozen=True)
class Arm:
    """Which roles are swapped: none (`own`), every one (`all`), `only` this role, or all `but` this role."""

    kind: Literal["own", "all", "only", "but"]
    role: str = ""

    def swaps(self, role: str) -> bool:
        """Whether the reference answers the calls of a role."""
        if self.kind == "only":
            return role == self.role
        if self.kind == "but":
            return role != self.role
        return self.kind == "all"

    @property
    def phase(self) -> str:
        """The phase under which the arm's episodes are recorded."""
        return f"{PHASES}{self.kind} {self.role}" if self.role else f"{PHASES}{self.kind}"

    @property
    def label(self) -> str:
        """The arm in an error message, after the words "all runs"."""
        if self.kind == "own":
            return "of the application as it is"
        if self.kind == "all":
            return "with all roles swapped"
        if self.kind == "only":
            return f"with only {self.role} swapped"
        return f"with all roles but {self.role} swapped"


OWN = Arm("own")
"""The application as it is: no role is swapped."""
ALL = Arm("all")
"""Every role is swapped to its reference."""


def arm_of(phase: str) -> Arm | None:
    """The arm of the runs that were recorded under a phase; None for a phase that is no arm's."""
    if not phase.startswith(PHASES):
        return None
    kind, _, role = phase.removeprefix(PHASES).partition(" ")
    if kind == "own":
        return OWN
    if kind == "all":
        return ALL
    if kind == "only":
        return Arm("only", role)
    if kind == "but":
        return Arm("but", role)
    return None


def only(role: str, roles: Sequence[str]) -> Arm:
    """The arm in which only this one of the `roles` is swapped. If there is no other role, it is the arm `all`."""
    return ALL if len(roles) == 1 else Arm("only", role)


def all_but(role: str, roles: Sequence[str]) -> Arm:
    """The arm in which all `roles` except this one are swapped.

    With one or two roles this arm has another name already, and is run under that name: `own`, or `only` the other.
    """
    if len(roles) == 1:
        return OWN
    if len(roles) == 2:
        (other,) = (name for name in roles if name != role)
        return Arm("only", other)
    return Arm("but", role)


def arms_of_round(live: Sequence[str], roles: Sequence[str]) -> list[Arm]:
    """The arms of one round, without duplicates: no role swapped, all `roles` swapped, and two arms for each role in
    `live`, with only this role swapped and with all roles but this one."""
    arms = [OWN, ALL]
    for role in live:
        arms += [only(role, roles), all_but(role, roles)]
    return list(dict.fromkeys(arms))


def better_half(live: Sequence[str], scores: Mapping[str, float]) -> list[str]:
    """The half of the `live` roles with the highest scores, but at least two roles. Only these stay live."""
    ranked = sorted(live, key=lambda role: -scores[role])
    return ranked[: max(2, (len(live) + 1) // 2)]
