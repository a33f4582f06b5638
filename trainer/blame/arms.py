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
        if self.kind in ("only", "but"):
            return (role == self.role) == (self.kind == "only")
        return self.kind == "all"

    @property
    def phase(self) -> str:
        """The phase under which the arm's episodes are recorded."""
        return f"{PHASES}{self.kind} {self.role}" if self.role else f"{PHASES}{self.kind}"

    @property
    def label(self) -> str:
        """The arm, for people: the runs `with all roles swapped`."""
        if self.kind == "own":
            return "of the application as it is"
        if self.kind == "all":
            return "with all roles swapped"
        return f"with only {self.role} swapped" if self.kind == "only" else f"with all roles but {self.role} swapped"


OWN, ALL = Arm("own"), Arm("all")


def arm_of(phase: str) -> Arm | None:
    """The arm that was recorded under a phase; None for the phase of anything else."""
    if not phase.startswith(PHASES):
        return None
    kind, _, role = phase.removeprefix(PHASES).partition(" ")
    if kind == "own":
        return OWN
    if kind == "all":
        return ALL
    if kind == "only":
        return Arm("only", role)
    return Arm("but", role) if kind == "but" else None


def only(role: str, roles: Sequence[str]) -> Arm:
    """The arm in which this role alone is swapped. If it is the only one, that is the arm `all`."""
    return ALL if len(roles) == 1 else Arm("only", role)


def all_but(role: str, roles: Sequence[str]) -> Arm:
    """The arm in which every role but this one is swapped. With two roles, that is the other one alone."""
    if len(roles) == 1:
        return OWN
    if len(roles) == 2:
        (other,) = (name for name in roles if name != role)
        return Arm("only", other)
    return Arm("but", role)


def arms_of_round(live: Sequence[str], roles: Sequence[str]) -> list[Arm]:
    """The arms of one round: the application as it is, all roles swapped, and two arms for each role that is still
    `live`. Each stands once."""
    arms = [OWN, ALL]
    for role in live:
        arms += [only(role, roles), all_but(role, roles)]
    return list(dict.fromkeys(arms))


def better_half(live: Sequence[str], scores: Mapping[str, float]) -> list[str]:
    """The half of the roles with the highest scores, and at least two: the next rounds are spent on these."""
    ranked = sorted(live, key=lambda role: -scores[role])
    return ranked[: max(2, (len(live) + 1) // 2)]
