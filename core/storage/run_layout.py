"""The files of a run folder: their names, and typed readers of those that are read outside the training loop.

RUN/run.json           all that repeats the run: config, workflow, tasks, versions
RUN/records.db         every episode, call, candidate and reward
RUN/judge.db           answers of judges and their cost
RUN/metrics.jsonl      one line per step
RUN/end.json           why the run ended, where that was before its last step
RUN/checkpoints/       step-000012/, `latest`, the name of the newest complete one, and best.json
RUN/tokens/           what the learner saw of each token of a step: step-000012.npz, see `token_figures`
RUN/notes.jsonl       thumbs and notes of people on candidates and episodes, from cotune view
RUN/profile/           the trace of a step that was profiled: step-000012.trace.json.gz
RUN/loggers.json       ids of the run in experiment trackers; RUN/tensorboard/ and RUN/wandb/ are their files
RUN/now.json           the phase of the run, while it is under way
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from cotune.config.train import TrainConfig
from cotune.errors import RunError
from cotune.records.policies import PolicyKind
from cotune.storage.checkpoints import latest_in
from cotune.storage.outcomes import failure_reward
from cotune.storage.typed_json import converted, read_if_typed, read_typed

T = TypeVar("T")

RECORDS = "records.db"
"""Name of the records file in a run folder."""
WITHHELD = "(not kept: taken from the environment)"
"""Written in place of the value of an environment variable."""
EARLIER = "cotune 0.1.0 at commit 953ea891"
"""The last cotune that reads checkpoints without the id of their run, and that upgrades records files of versions 3 to
5."""
EARLIER_SETTINGS = "cotune 0.1.0 at commit c965d46f"
"""The last cotune that reads runs whose configuration has `overrides`."""
_RUN = "run.json"
FUNCTIONS = ("redact", "roles_by", "recipe", "teacher_sees")
"""Settings that may name a function or class of the user's, wherever in a configuration."""


class Held(msgspec.Struct, frozen=True):
    """Digests of the base models that a run was started with, by part: of its own, and of those that policies have
    instead, by policy."""

    base: dict[str, str] = {}
    bases: dict[str, dict[str, str]] = {}

    def of(self, policy: str) -> dict[str, str]:
        """Digests of the base of a policy; empty where they are not known."""
        return self.bases.get(policy, self.base)


class Precision(msgspec.Struct, frozen=True, kw_only=True):
    """What `learner.dtype = "auto"` is for the run on a device.

    `gap` is the mean difference between sampler and learner in bfloat16, in nats a token, where it was measured.
    `fell_back`: the gap was above `probe_bound`, at the start or later, or the rounding of bfloat16 alone reaches a
    bound of the loss, as `noise` says.
    """

    dtype: str
    device: Literal["cpu", "cuda"] = "cpu"
    gap: float | None = None
    fell_back: bool = False
    noise: str = ""


class RunDescription(msgspec.Struct, frozen=True):
    """The part of run.json that is read again. `model` is a folder or Hugging Face id, `workflow` an address like
    `app:solve`, `prompts` is the id of its edited prompts, empty without any, and `precision` that of "auto"."""

    id: str = ""
    model: str | None = None
    held: Held = Held()
    workflow: str | None = None
    config: TrainConfig = TrainConfig()
    prompts: str = ""
    precision: Precision | None = None

    def __post_init__(self) -> None:
        failure_reward(self.config.on_failure)  # screens count failed episodes by it

    def dtype_of(self, kinds: Collection[PolicyKind]) -> str | None:
        """The precision in which adapters were trained; None where the run did not decide it, and where among the
        `kinds` of its policies are full weights, which are sampled in float32."""
        found = self.config.learner.dtype if self.precision is None else self.precision.dtype
        return None if found == "auto" or "full" in kinds else found

    def base_of(self, policy: str) -> str | None:
        """The base model of a policy, where it is not the run's `model`."""
        own = self.config.own_of(policy)
        return own.model or None if own is not None else None


class _Described(RunDescription, frozen=True, kw_only=True):
    """Fields that every run.json has, typed."""

    tasks: str | None = None
    run: str | None = None
    folder: str | None = None


class RunEnd(msgspec.Struct, frozen=True, kw_only=True):
    """Why a run ended before its last step: it failed, it was stopped, or it ended by its own settings."""

    kind: Literal["failed", "stopped", "ended"]
    cause: str
    remedy: str = ""


class RunLayout:
    """The paths of a run folder's files; none of them need exist."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.run_json = self.path / _RUN
        self.records = self.path / RECORDS
        self.metrics = self.path / "metrics.jsonl"
        self.end = self.path / "end.json"
        self.lock = self.path / "lock"
        self.checkpoints = self.path / "checkpoints"
        self.profiles = self.path / "profile"
        self.latest = latest_in(self.checkpoints)


def is_run(path: str | Path) -> bool:
    """Whether a folder holds a run."""
    return (Path(path) / _RUN).is_file()


def read_run_json(path: str | Path) -> dict[str, Any]:
    """All of run.json. Raises RunError when the folder holds no run, or the file is broken."""
    file = RunLayout(path).run_json
    if not file.is_file():
        raise RunError(f"{path} holds no run: there is no run.json.", "Name a folder that cotune train wrote.")
    remedy = "Restore it, or start a new run."
    found = read_typed(file, dict[str, Any], remedy)
    config = found.get("config")
    if isinstance(config, dict) and "overrides" in config:
        raise RunError(
            f"{file} was written by an earlier cotune, whose settings had other names.",
            f"Read it with {EARLIER_SETTINGS}, or train anew; CHANGELOG.md lists the names.",
        )
    converted(file, found, _Described, remedy)
    return found


def read_config(path: str | Path) -> dict[str, Any]:
    """The configuration in run.json, with the functions that it names where they are now. Raises RunError as
    `read_run_json` does, and where there is none."""
    described = read_run_json(path)
    found = described.get("config")
    if not isinstance(found, dict):
        raise RunError(f"{RunLayout(path).run_json} is broken: it has no `config`.", "Restore it, or start a new run.")
    return placed_config(described, Path(path).absolute())


def placed_config(described: Mapping[str, Any], run: Path) -> dict[str, Any]:
    """The configuration of a description, with the functions that it names where they are now."""
    placed: dict[str, Any] = with_addresses(described["config"], lambda one: address_now(one, described, run))
    return placed


def read_run(path: str | Path) -> RunDescription:
    """run.json as typed fields; the model where it is now. Raises RunError as `read_run_json` does."""
    known = read_run_json(path)
    found = converted(RunLayout(path).run_json, known, RunDescription, "Restore it, or start a new run.")
    if found.model is None:
        return found
    return msgspec.structs.replace(found, model=relocated(found.model, known, Path(path).absolute()))


def relocated(path: str, described: Mapping[str, Any], run: Path) -> str:
    """`path` of run.json if it exists; else its place next to the run, if the whole project has moved."""
    if Path(path).exists() or not Path(path).is_absolute():
        return path
    old_run = described.get("run")
    for moved in (run / os.path.relpath(path, old_run) if old_run else None, run.parent / Path(path).name):
        if moved is not None and moved.exists():
            return str(moved.resolve())
    return path


def known_workflow(described: Mapping[str, Any], run: Path) -> str | None:
    """The workflow that run.json names, where it is now; None where it names none."""
    known = described.get("workflow")
    return None if known is None else address_now(known, described, run)


def with_addresses(value: Any, place: Callable[[str], str], name: str = "") -> Any:
    """A configuration as plain data, with `place` of the address of each function that it names."""
    if isinstance(value, Mapping):
        return {key: with_addresses(item, place, key) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [with_addresses(item, place) for item in value]
    return place(value) if name in FUNCTIONS and isinstance(value, str) and ":" in value else value


def whole_address(address: str) -> str:
    """`module:name`, or `file.py:name` with the whole path of the file."""
    source, _, name = address.rpartition(":")
    return f"{Path(source).resolve()}:{name}" if source.endswith(".py") else address


def address_now(address: str, described: Mapping[str, Any], run: Path) -> str:
    """An address of run.json where it is now. Nothing is imported; see `run_code` for that."""
    source, _, name = address.rpartition(":")
    return f"{relocated(source, described, run)}:{name}"


def leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Fields of nested tables by their dotted names."""
    for name, value in table.items():
        if not isinstance(value, Mapping):
            yield prefix + name, value
        else:
            yield from leaves(value, f"{prefix}{name}.")


def is_withheld(name: str) -> bool:
    """Whether the value of a field, by its dotted name, is not written anywhere: it may be a key."""
    return any(f".{table}." in f".{name}" for table in ("cluster.env", "cluster.runtime_env.env_vars"))


def without_values(described: Any, name: str = "") -> Any:
    """A copy of a configuration, or of all of run.json, with WITHHELD for values of environment variables."""
    if is_withheld(name):
        return WITHHELD
    if isinstance(described, Mapping):
        return {key: without_values(value, f"{name}.{key}") for key, value in described.items()}
    return [without_values(one, name) for one in described] if isinstance(described, list) else described


def read_end(path: str | Path) -> RunEnd | None:
    """Why a run ended before its last step; None where no file gives a reason, or it cannot be read."""
    return read_if_typed(RunLayout(path).end, RunEnd)
