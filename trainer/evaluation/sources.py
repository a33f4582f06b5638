"""Sources of policies for a role, as users name them on the command line (`--use planner=runs/r1#40`).

    RUN          the newest checkpoint of a run
    RUN#40       its checkpoint after 40 steps; RUN#best: each policy at its best held-out evaluation
    EXPORT       a folder that `cotune export` wrote
    MODEL        a model folder or a Hugging Face id, untrained

Reading a value checks that it exists and has one of these forms. Nothing is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cotune.adapters.manifest import is_export
from cotune.errors import ConfigError
from cotune.integrations.models.folder.folder import locate_model
from cotune.storage.run_layout import is_run

SourceKind = Literal["run", "export", "model"]
Step = int | Literal["best"] | None
"""A checkpoint: after a number of steps, the best one of each policy, or the newest (None)."""
FORMS = "a run (RUN or RUN#STEP), an export, a model folder or a Hugging Face id"
REST = "*"
"""The key for all roles that are not named."""


@dataclass(frozen=True)
class Source:
    """A run, an export or a model that policies come from. `text` is the value as the user wrote it, `place` the folder
    or the id in it."""

    text: str
    kind: SourceKind
    place: str
    step: Step = None

    @property
    def name(self) -> str:
        """A short name: the last part of the place, and the checkpoint if it is not the newest."""
        last = Path(self.place).name
        if Path(self.place).expanduser().exists():
            last = Path(self.place).resolve().name
        return last if self.step is None else f"{last}#{self.step}"


def read_source(value: str | Path, flag: str) -> Source:
    """Return the source that a value names. Raises ConfigError, which names `flag`, if it has none of the forms."""
    text = str(value)
    folder, step = _split_step(text, flag)
    if is_run(folder):
        return Source(text, "run", str(folder), step)
    if step is not None:
        raise ConfigError(flag, text, f"names a checkpoint, but {folder} is not a run", f"Name {FORMS}.")
    if is_export(folder):
        return Source(text, "export", str(folder))
    if (folder / "adapter_config.json").is_file():
        fault = f"is an adapter on {_base_of_adapter(folder)} without that base"
        remedy = "Name the run or the export that it comes from: they record the base it was trained on."
        if is_export(folder.parent):
            remedy = f"Name the export, which records its base: {folder.parent}"
        raise ConfigError(flag, text, fault, remedy)
    try:
        locate_model(text)
    except ConfigError as error:
        fault = f"is not {FORMS}: {error.fault}"
        raise ConfigError(flag, text, fault, error.remedy) from None
    return Source(text, "model", text)


def read_trained(value: str | Path, flag: str) -> Source:
    """Return the run or the export that a value names. It need not exist: opening it raises then. Raises ConfigError
    for a checkpoint that is not a number or `best`."""
    text = str(value)
    folder, step = _split_step(text, flag)
    if is_export(folder):
        return Source(text, "export", str(folder))
    return Source(text, "run", str(folder), step)


def split_assignments(values: Iterable[str], flag: str) -> dict[str, str]:
    """Split values of the form ROLE=SOURCE into the text of the source of each role. A SOURCE alone is for all other
    roles (`REST`).

    Raises ConfigError if one role has two sources.
    """
    texts: list[tuple[str, str]] = []
    for value in values:
        role, equals, text = value.partition("=")
        # The equals sign may be part of a path.
        if not equals or Path(value).expanduser().exists():
            role, text = REST, value
        texts.append((role, text))
    text_of_role: dict[str, str] = {}
    for role, text in texts:
        if not role or not text:
            raise ConfigError(flag, f"{role}={text}", "must be ROLE=SOURCE", f"SOURCE is {FORMS}.")
        if role in text_of_role:
            whom = "all other roles" if role == REST else f"role {role!r}"
            fault = f"has two policies: {text_of_role[role]} and {text}"
            raise ConfigError(flag, whom, fault, "Name one of the two.")
        text_of_role[role] = text
    return text_of_role


def read_sources(values: Mapping[str, str | Path], flag: str) -> dict[str, Source]:
    """Return the source of each role. Raises ConfigError if there are no values."""
    if not values:
        raise ConfigError(flag, None, "is missing", f"For example: {flag} planner=runs/r1. The value is {FORMS}.")
    return {role: read_source(value, flag) for role, value in values.items()}


def _split_step(text: str, flag: str) -> tuple[Path, Step]:
    """Split RUN#STEP into the folder and the checkpoint. A # in the name of an existing folder is part of the name."""
    folder = Path(text).expanduser()
    if folder.exists() or "#" not in text:
        return folder, None
    before, _, after = text.rpartition("#")
    if after == "best":
        return Path(before).expanduser(), "best"
    if not after.isdecimal():
        raise ConfigError(flag, text, f"does not name a checkpoint: {after!r}", "Write RUN#40 or RUN#best.")
    return Path(before).expanduser(), int(after)


def _base_of_adapter(folder: Path) -> str:
    try:
        return str(json.loads((folder / "adapter_config.json").read_bytes())["base_model_name_or_path"])
    except (ValueError, KeyError, TypeError):
        return "a base model that its adapter_config.json does not name"
