"""The files of a run folder: their names, and typed readers of those that are read outside the training loop.

RUN/run.json           everything needed to repeat the run: config, workflow, tasks, versions
RUN/records.db         every episode, call, candidate and reward
RUN/judge.db           answers of judges and their cost
RUN/metrics.jsonl      one line per step
RUN/end.json           why the run ended, if it ended before its last step
RUN/checkpoints/       step-000012/; `latest`, the name of the newest complete one; best.json
RUN/tokens/            the learner's figures of each token of a step: step-000012.npz, see `token_figures`
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


class BaseDigests(msgspec.Struct, frozen=True):
    """Digests of the base models that a run was started with, by part."""

    base: dict[str, str] = {}
    """The run's base model."""
    bases: dict[str, dict[str, str]] = {}
    """Base models of policies that do not use the run's, by policy."""

    def of(self, policy: str) -> dict[str, str]:
        """Digests of the base model of a policy; empty if they are unknown."""
        return self.bases.get(policy, self.base)


class Precision(msgspec.Struct, frozen=True, kw_only=True):
    """The precision that `learner.dtype = "auto"` chose for the run on a device.

    `gap` is the mean difference between sampler and learner in bfloat16, in nats per token, if it was measured.
    `fell_back` is whether float32 replaced bfloat16: because the gap was above `probe_bound`, at the start or later, or
    because the rounding of bfloat16 alone reaches a bound of the loss. `noise` describes the second case.
    """

    dtype: str
    device: Literal["cpu", "cuda"] = "cpu"
    gap: float | None = None
    fell_back: bool = False
    noise: str = ""


class RunDescription(msgspec.Struct, frozen=True):
    """The typed part of run.json. `model` is a folder or Hugging Face id, `workflow` an address like `app:solve`,
    `prompts` the id of its edited prompts, empty without any. `precision` is the choice of dtype "auto"."""

    id: str = ""
    model: str | None = None
    held: BaseDigests = BaseDigests()
    workflow: str | None = None
    config: TrainConfig = TrainConfig()
    prompts: str = ""
    precision: Precision | None = None

    def __post_init__(self) -> None:
        failure_reward(self.config.on_failure)  # raises for a broken value, before a screen counts failures by it

    def dtype_of(self, kinds: Collection[PolicyKind]) -> str | None:
        """The precision in which adapters were trained; None if the run did not decide it. `kinds` are the kinds of its
        policies: with full weights among them it is None too, as these are sampled in float32."""
        if "full" in kinds:
            return None
        dtype = self.config.learner.dtype if self.precision is None else self.precision.dtype
        return None if dtype == "auto" else dtype

    def base_of(self, policy: str) -> str | None:
        """The base model of a policy, if it is not the run's `model`."""
        settings = self.config.policy_table(policy)
        if settings is None:
            return None
        return settings.model or None


class _RunJson(RunDescription, frozen=True, kw_only=True):
    """All fields of run.json that must have a certain type."""

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
        """`path` is the run folder, which need not exist."""
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
    described = read_typed(file, dict[str, Any], remedy)
    config = described.get("config")
    if isinstance(config, dict) and "overrides" in config:
        raise RunError(
            f"{file} was written by an earlier cotune, whose settings had other names.",
            f"Read it with {EARLIER_SETTINGS}, or train again; CHANGELOG.md lists the names.",
        )
    converted(file, described, _RunJson, remedy)
    return described


def read_config(path: str | Path) -> dict[str, Any]:
    """The configuration in run.json, with the present addresses of its functions. Raises RunError as `read_run_json`
    does, and if there is no configuration."""
    described = read_run_json(path)
    if not isinstance(described.get("config"), dict):
        raise RunError(f"{RunLayout(path).run_json} is broken: it has no `config`.", "Restore it, or start a new run.")
    return placed_config(described, Path(path).absolute())


def placed_config(described: Mapping[str, Any], run: Path) -> dict[str, Any]:
    """The configuration in the content of a run.json, with the present addresses of its functions."""
    config: dict[str, Any] = with_addresses(
        described["config"], lambda address: present_address(address, described, run)
    )
    return config


def read_run(path: str | Path) -> RunDescription:
    """run.json as typed fields, with the present path of the model. Raises RunError as `read_run_json` does."""
    described = read_run_json(path)
    run = converted(RunLayout(path).run_json, described, RunDescription, "Restore it, or start a new run.")
    if run.model is None:
        return run
    return msgspec.structs.replace(run, model=relocated(run.model, described, Path(path).absolute()))


def relocated(path: str, described: Mapping[str, Any], run: Path) -> str:
    """The present place of a file or folder that run.json names by `path`. It may have moved together with the run
    folder, which is `run` now. `path` itself if it exists, or if nothing is found."""
    if Path(path).exists() or not Path(path).is_absolute():
        return path
    possible_paths: list[Path] = []
    old_run = described.get("run")
    if old_run:
        # The whole project may have moved: then the path is the same as before, seen from the run folder.
        possible_paths.append(run / os.path.relpath(path, old_run))
    possible_paths.append(run.parent / Path(path).name)  # or it was moved next to the run folder
    for possible_path in possible_paths:
        if possible_path.exists():
            return str(possible_path.resolve())
    return path


def known_workflow(described: Mapping[str, Any], run: Path) -> str | None:
    """The present address of the workflow that run.json names; None if it names none."""
    address = described.get("workflow")
    return None if address is None else present_address(address, described, run)


def with_addresses(value: Any, new_address: Callable[[str], str], name: str = "") -> Any:
    """A copy of a configuration in which `new_address` has changed the address (`module:name`) of each function.

    `value` is plain data: the configuration, or a part of it under the key `name`.
    """
    if isinstance(value, Mapping):
        return {key: with_addresses(item, new_address, key) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [with_addresses(item, new_address) for item in value]
    is_address = name in FUNCTIONS and isinstance(value, str) and ":" in value
    return new_address(value) if is_address else value


def whole_address(address: str) -> str:
    """`module:name` as it is; `file.py:name` with the whole path of the file."""
    source, _, name = address.rpartition(":")
    return f"{Path(source).resolve()}:{name}" if source.endswith(".py") else address


def present_address(address: str, described: Mapping[str, Any], run: Path) -> str:
    """An address of run.json with the present path of its file. Imports nothing; see `run_code` for that."""
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
    """Whether the value of a field, by its dotted name, must not be written anywhere: it may be a key."""
    return any(f".{table}." in f".{name}" for table in ("cluster.env", "cluster.runtime_env.env_vars"))


def without_values(described: Any, name: str = "") -> Any:
    """A copy of a configuration, or of all of run.json, with WITHHELD in place of the values of environment variables.

    `name` is the dotted name of `described` in run.json, for a part of it."""
    if is_withheld(name):
        return WITHHELD
    if isinstance(described, Mapping):
        return {key: without_values(value, f"{name}.{key}") for key, value in described.items()}
    if isinstance(described, list):
        return [without_values(item, name) for item in described]
    return described


def read_end(path: str | Path) -> RunEnd | None:
    """The reason why a run ended before its last step; None if there is no file with it, or it cannot be read."""
    return read_if_typed(RunLayout(path).end, RunEnd)
