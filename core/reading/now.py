"""The present phase of a run: a small file that training writes and every screen reads."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from cotune.storage.file_lock import is_held
from cotune.storage.run_layout import RunLayout
from cotune.storage.typed_json import read_if_typed

NOW = "now.json"
"""Name of the file in a run folder. It exists while the run is under way."""


class Now(msgspec.Struct, frozen=True, kw_only=True):
    """The phase of a run: `rollout`, 37 of 64 episodes, in step 12 of 100. Times are Unix times, `left` seconds."""

    phase: str
    """load | look | rollout | group | update | publish | evaluate | checkpoint | ..., as `seconds` in metrics.jsonl."""
    of: str = ""
    """The object of the phase: the policies of an update, the weights that are loaded."""
    done: int = 0
    total: int = 0
    """Finished episodes of the phase (`done`) and all its episodes (`total`); 0 for a phase without episodes."""
    step: int = 0
    """The present step, from 1; 0 before the first one."""
    steps: int = 0
    since: float = 0.0
    """The time when the phase began."""
    left: float | None = None
    """Estimated seconds to the end of the run, from the steps so far, at the time `written`; None before the first."""
    written: float = 0.0

    @property
    def text(self) -> str:
        """The phase as text: `rollout, 37 of 64 episodes`, `update of writer`."""
        text = PHASES.get(self.phase, self.phase)
        if self.of:
            text += f" of {self.of}"
        if self.total:
            text += f", {self.done:,} of {self.total:,} episodes"
        return text

    def remaining(self, now: float | None = None) -> float | None:
        """Estimated seconds from now to the end of the run. `now` replaces the present time."""
        if self.left is None:
            return None
        present = time.time() if now is None else now
        return max(self.left - (present - self.written), 0.0)


PHASES = {
    "load": "loading",
    "look": "look at the application",
    "group": "grouping",
    "publish": "publishing the weights",
    "evaluate": "evaluation on held-out tasks",
    "checkpoint": "saving a checkpoint",
    "new_roles": "policies for new roles",
}
"""Names on screens for phases that have another name in metrics.jsonl."""


def read_now(run: Path) -> Now | None:
    """The phase of a run; None unless a process is training it."""
    if not is_held(RunLayout(run).lock):
        return None
    return read_if_typed(run / NOW, Now)
