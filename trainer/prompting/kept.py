"""What a run of several stages has kept, as its strategy.json says."""

from __future__ import annotations

from pathlib import Path

import msgspec

from cotune.errors import RunError

FILE = "strategy.json"


class _Stage(msgspec.Struct, frozen=True):
    letter: str
    folder: str
    kept: bool


class _Stages(msgspec.Struct, frozen=True):
    stages: tuple[_Stage, ...] = ()


def is_strategy(folder: str | Path) -> bool:
    """Whether a folder holds a run of several stages."""
    return (Path(folder) / FILE).is_file()


def kept_of(folder: str | Path) -> tuple[Path, Path | None]:
    """The run whose weights are kept, and the folder of the prompts that are, None where no search gave better ones.
    Raises RunError where no weights are kept."""
    told = msgspec.json.decode((Path(folder) / FILE).read_bytes(), type=_Stages)
    last = {stage.letter: Path(folder) / stage.folder for stage in told.stages if stage.kept}
    if "w" not in last:
        cause = f"No stage of {folder} has kept weights: none was better on the held-out tasks."
        raise RunError(cause, "Export the run of one stage, such as 1-weights in it, or train again.")
    return last["w"], last.get("p")
