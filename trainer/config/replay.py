"""The configuration of the replay plan."""

from __future__ import annotations

from typing import Literal

from cotune.errors import check_bounds
from cotune.replay.forks import fork_rule
from cotune.storage.run_config import RunReplay


class ReplayConfig(RunReplay, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[replay] Under `plan.kind = "replay"`: which calls of an episode are forked; see docs/how-to/replay.md."""

    forks_per_episode: int = 4
    """Most calls of an episode that are forked. Where `forks` takes more, a random choice, new in each step, in which
    late calls are likelier: a call's chance goes with 1 / the number of calls from it on, as does what its outcomes
    tell per token."""

    tools: Literal["run", "recorded"] = "run"
    """What a framework's tools do in the part of a branch that repeats its trunk: they run again | they give back what
    they returned in the trunk, as functions under `cotune.recorded` always do."""

    freeze: bool = False
    """Whether clock, uuid and random give, in the part of a branch that repeats its trunk, what they gave there: for
    prompts that hold a date, an id or a random choice. See docs/how-to/replay.md for what is frozen."""

    def __post_init__(self) -> None:
        fork_rule(self.forks)
        check_bounds(self, "forks_per_episode", least=1, table="replay.")
