"""strategy.json: what a run of several stages is, what each stage gave, and what may change when it goes on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from cotune.errors import ConfigError, RunError
from cotune.storage.run_layout import address_now, leaves, with_addresses
from cotune.trainer.config.train import TrainConfig, convert
from cotune.trainer.config.withheld import with_values, written
from cotune.trainer.prompting.held_out import HeldOut
from cotune.trainer.prompting.kept import FILE
from cotune.trainer.prompting.options import LIMITS, ImproveOptions, check_changes, load_options
from cotune.trainer.run.resume import apply_changes

_OWN = frozenset({"strategy", "prompts", "init", "seed", "evaluation"})
"""Fields of which each training has its own."""


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """What a stage gave. `held_out` compares it with what was kept before it; None where there was nothing to compare,
    with the reason in `note`. `limited` is a search that ended at a limit."""

    number: int
    letter: str
    folder: str
    kept: bool
    held_out: HeldOut | None = None
    note: str = ""
    limited: bool = False


class Described(msgspec.Struct, frozen=True, kw_only=True):
    """Content of strategy.json. Addresses of functions are found from `cwd`, where the run was started."""

    app: str
    tasks: str
    task_ids: tuple[str, ...]
    cwd: str
    config: dict[str, Any]
    search: ImproveOptions
    stages: tuple[Stage, ...] = ()


def read_strategy(folder: Path) -> Described:
    """Raises RunError where there is none, or it is broken."""
    try:
        found = msgspec.json.decode((folder / FILE).read_bytes(), type=Described)
    except FileNotFoundError:
        raise RunError(f"{folder} holds no run of several stages.", "Name a folder with a strategy.json.") from None
    except msgspec.DecodeError as error:
        raise RunError(f"{folder / FILE} is broken: {error}.", "Start a new run, with another --out.") from None

    def place(address: str) -> str:
        return address_now(address, {"folder": found.cwd}, folder)

    app = place(found.app) if found.app else ""
    return msgspec.structs.replace(found, app=app, config=with_addresses(found.config, place))


def changed(
    described: Described, changes: Mapping[str, Any], search: Mapping[str, Any]
) -> tuple[Described, TrainConfig, dict[str, Any]]:
    """The run with `changes` of its trainings and of its searches, its configuration, and those of the changes that a
    training under way takes. A last search that ended at a limit goes on where the limit is another one.

    Raises ConfigError for a change that would make it another run.
    """
    was = convert(with_values(described.config, changes))
    config, found = apply_changes(was, changes, done=0)
    if name := next((name for name in found if name.startswith("evaluation.")), ""):
        fault = f"was {found[name][0]!r} when the run was started, and its stages are compared by it"
        raise ConfigError(name, found[name][1], fault, "Leave it out to go on, or start a new run.")
    before = msgspec.to_builtins(described.search)
    options = load_options(None, search, before)
    check_changes(before, msgspec.to_builtins(options))
    stages = described.stages
    if stages and stages[-1].limited and any(getattr(options, name) != before[name] for name in LIMITS):
        stages = stages[:-1]
    now = msgspec.structs.replace(described, config=written(config), search=options, stages=stages)
    # Those that the run has already, too: the training may have been killed before it had them.
    return now, config, {name: value for name, value in leaves(changes) if name.partition(".")[0] not in _OWN}
