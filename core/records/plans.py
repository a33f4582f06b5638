"""Plans: where candidates come from, and which one the application gets."""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from cotune.errors import ConfigError

PlanKind = Literal["tree", "independent", "replay"]
Select = Literal["argmax", "sample", "first"]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How candidates are sampled.

    `tree`: `k` candidates per call, all scored; the application gets one. `independent`: `k` episodes per task, one
    candidate per call. `replay`: one episode per task, and at some of its calls `k` - 1 additional candidates, each
    with a new episode that continues from it.

    `select` chooses the candidate that the application gets: the best by the trained reward, a random one, or the first
    sampled.
    """

    kind: PlanKind = "tree"
    k: int = 4
    select: Select = "argmax"

    def __post_init__(self) -> None:
        """Raise ConfigError for fewer than two candidates."""
        if self.k < 2:
            raise ConfigError(
                "plan.k",
                self.k,
                "must be 2 or more: a group of one has no baseline",
                "Use cotune trace or cotune eval to run without groups.",
            )

    @property
    def episodes_per_task(self) -> int:
        return self.k if self.kind == "independent" else 1


def seed_of(*parts: object) -> int:
    """A 31-bit seed that depends only on its parts, so that it is the same in every process and order of events."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1
