"""The configuration of the replay plan."""

from __future__ import annotations

from typing import Literal

import msgspec

from cotune.errors import check_bounds
from cotune.replay.forks import fork_rule


class ReplayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[replay] Under `plan.kind = "replay"`: which calls of an episode are forked; see docs/how-to/replay.md."""

    forks: str = "all"
    """all | first:N (the first N calls) | every:N (each Nth) | entropy:N (the N whose answers have the highest
    mean -log p per token; these answers are not compared, so a fork has K branches) | role:NAME (all calls of a role).
    Only calls of trained roles count."""
    forks_per_episode: int = 4
    """Most calls of an episode that are forked. Where `forks` takes more, a random choice, new in each step, in which
    late calls are likelier: a call's chance goes with 1 / the number of calls from it on, as does what its outcomes
    tell per token."""

    continuations: bool = True
    """Train also on what a branch goes on to say after its fork, with the advantage of the candidate that it goes on
    from. false: on the candidates of the forks alone, as C3 has it (arXiv 2603.06859), which learns less per token."""

    tools: Literal["run", "recorded"] = "run"
    """What a framework's tools do in the part of a branch that repeats its trunk: they run again | they give back what
    they returned in the trunk, as functions under `cotune.recorded` always do."""

    freeze: bool = False
    """Whether clock, uuid and random give, in the part of a branch that repeats its trunk, what they gave there: for
    prompts that hold a date, an id or a random choice. See docs/how-to/replay.md for what is frozen."""

    @property
    def trunks(self) -> bool:
        """Whether the answers of an episode at its forks are trained on, beside those of its branches."""
        return not fork_rule(self.forks).by_answer

    def __post_init__(self) -> None:
        fork_rule(self.forks)
        check_bounds(self, "forks_per_episode", least=1, table="replay.")
