"""The configuration of the replay plan."""

from __future__ import annotations

from typing import Literal

from cotune.errors import check_bounds
from cotune.replay.forks import fork_rule
from cotune.storage.run_config import RunReplay


class ReplayConfig(RunReplay, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[replay] Under `plan.kind = "replay"`: which calls of an episode are forked; see docs/how-to/replay.md."""

    budget: int = 4
    """At most this many calls of an episode are forked. If `forks` takes more, each step draws from them; the chance of
    a call is proportional to 1 / (calls from it to the end), as is the information of its outcomes per token."""

    tools: Literal["run", "recorded", "frozen"] = "run"
    """A framework's tools in the part of a branch that repeats its trunk. run: they run again | recorded: they return
    what they returned in the trunk, as functions under `cotune.recorded` always do | frozen: as recorded, and clock,
    uuid and random have their values of the trunk too, for prompts with a date, an id or a random choice.
    docs/how-to/replay.md lists what is frozen."""

    def __post_init__(self) -> None:
        fork_rule(self.forks)
        check_bounds(self, "budget", least=1, table="replay.")
