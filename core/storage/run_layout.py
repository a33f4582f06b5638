"""The files of a run folder: their names, and typed readers of what is read again outside the training loop.

RUN/run.json           what is needed to repeat the run: config, workflow, tasks, versions
RUN/records.db         every episode, call, candidate and reward
RUN/judge.db           what judges have answered and cost
RUN/metrics.jsonl      one line per step
RUN/abandoned.jsonl    the lines of steps that a rollback has abandoned
RUN/end.json           why the run ended, where that was before its last step
RUN/checkpoints/       step-000012/, `latest`, the name of the newest complete one, and best.json
RUN/profile/           where the time of steps went that were profiled: step-000012.json, step-000012.trace.json.gz
RUN/loggers.json       under which ids experiment trackers know the run, and RUN/tensorboard/, RUN/wandb/ what they keep
RUN/now.json           what the run is doing, while it is under way
RUN/opponents/         weights of earlier versions that later steps may play against, where [routing] asks for them
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, TypeVar

import msgspec

from cotune.errors import RunError
from cotune.storage.checkpoints import latest_in, read_identity
from cotune.storage.run_config import RunConfig
from cotune.storage.typed_json import converted, fault, loaded, read_if_typed, read_typed

log = logging.getLogger("cotune")
T = TypeVar("T")

RECORDS = "records.db"
"""Name of the records file in a run folder."""
WITHHELD = "(not kept: taken from the environment)"
"""What is written in place of the value of an environment variable."""
_RUN = "run.json"


class Held(msgspec.Struct, frozen=True):
    """What a run was started with, by digests: those of its base model, by part."""

    base: dict[str, str] = {}


class Rollback(msgspec.Struct, frozen=True):
    """A return to the checkpoint after the first `to` of `steps` steps, and why; `versions` were those served then."""

    to: int
    steps: int
    why: str = ""
    versions: dict[str, int] = {}

    @property
    def text(self) -> str:
        """`steps 5 to 6 abandoned: rolled back to step 4, as ...`."""
        steps = f"steps {self.to + 1} to {self.steps}" if self.steps > self.to + 1 else f"step {self.steps}"
        return f"{steps} abandoned: rolled back to step {self.to}{f', as {self.why}' if self.why else ''}"


class RunDescription(msgspec.Struct, frozen=True):
    """What of run.json is read again. `model` is a folder or Hugging Face id, `workflow` where the workflow is, and
    `rollbacks` are those that the run has made, oldest first."""

    id: str = ""
    model: str | None = None
    held: Held = Held()
    workflow: str | None = None
    config: RunConfig = RunConfig()
    rollbacks: tuple[Rollback, ...] = ()


class _Described(RunDescription, frozen=True, kw_only=True):
    """What every run.json has, typed."""

    tasks: str | None = None
    run: str | None = None
    folder: str | None = None


class RunEnd(msgspec.Struct, frozen=True, kw_only=True):
    """Why a run ended before its last step: it failed, it was stopped, or it ended by its own settings."""

    kind: Literal["failed", "stopped", "ended"]
    cause: str
    remedy: str = ""


_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
_Counts = dict[str, _Count]
_Figures = dict[str, float | None]


class _Line(msgspec.Struct):
    """What a line of metrics.jsonl has that is read again, typed; `trainer.reporting.metrics` documents the fields."""

    step: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    outcome: _Figures
    left_out: _Counts
    calls: _Count
    candidates: _Count
    groups: _Count
    episodes: _Count = 0
    failed: _Count = 0
    unknown: _Count = 0
    rows: _Count = 0
    path: str = ""
    candidate_reward: float | None = None
    held_out: _Figures = {}
    roles: dict[str, _Figures] = {}
    policies: dict[str, _Figures] = {}
    staleness: _Counts = {}
    counters: _Figures = {}
    lr_scale: float | None = None
    seconds: _Figures = {}
    tokens_per_s: float | None = None
    rollout_tokens_per_s: float | None = None
    update_tokens_per_s: float | None = None
    total_tokens: _Count = 0
    distinct_tokens: _Count = 0
    updated: bool = True
    stayed: dict[str, str] = {}
    silent: _Counts = {}
    notes: list[str] = []
    replay: _Counts = {}


_FIGURES = ("outcome", "held_out", "roles", "policies", "counters", "seconds", "left_out")
"""Fields of figures: every line has them for its readers, without those that are null."""


class RunLayout:
    """The paths of a run folder's files; none of them need exist."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.run_json = self.path / _RUN
        self.records = self.path / RECORDS
        self.metrics = self.path / "metrics.jsonl"
        self.abandoned = self.path / "abandoned.jsonl"
        self.end = self.path / "end.json"
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
    converted(file, found, _Described, remedy)
    return found


def read_config(path: str | Path) -> dict[str, Any]:
    """The configuration in run.json. Raises RunError as `read_run_json` does, and where there is none."""
    found = read_run_json(path).get("config")
    if not isinstance(found, dict):
        raise RunError(f"{RunLayout(path).run_json} is broken: it has no `config`.", "Restore it, or start a new run.")
    return found


def read_run(path: str | Path) -> RunDescription:
    """What of run.json is read again, typed; the model where it is now. Raises RunError as `read_run_json` does."""
    known = read_run_json(path)
    found = converted(RunLayout(path).run_json, known, RunDescription, "Restore it, or start a new run.")
    if found.model is None:
        return found
    return msgspec.structs.replace(found, model=relocated(found.model, known, Path(path).absolute()))


def relocated(path: str, described: Mapping[str, Any], run: Path) -> str:
    """`path` of run.json if it exists; else its place beside the run, if the whole project has moved."""
    if Path(path).exists() or not Path(path).is_absolute():
        return path
    old_run = described.get("run")
    for moved in (run / os.path.relpath(path, old_run) if old_run else None, run.parent / Path(path).name):
        if moved is not None and moved.exists():
            return str(moved.resolve())
    return path


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


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl. Broken ones (a last line cut by a crash, damage) are left out, counted in the log."""
    return _metrics_file(RunLayout(path).metrics.absolute()).lines()


@functools.lru_cache(256)
def _metrics_file(file: Path) -> _MetricsFile:
    return _MetricsFile(file)


class _MetricsFile:
    """A file of lines that is read again and again: where it has only grown, its new lines alone."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._lines: list[dict[str, Any]] = []
        self._inode = self._end = self._number = 0
        self._last = b""
        """The line that ended at `_end`: if it is no longer there, the file was written anew."""

    def lines(self) -> list[dict[str, Any]]:
        with self._lock:
            try:
                with self._file.open("rb") as file:
                    whole, rest = self._new(file)
            except OSError:
                return []
            broken: list[str] = []
            self._lines += self._parsed(whole, broken)
            self._number += len(whole)
            found = [*self._lines, *self._parsed([rest], broken)]
        if broken:
            many = f"{len(broken)} broken {'line is' if len(broken) == 1 else 'lines are'} left out"
            log.warning("%s: %s (%s)", self._file, many, broken[0])
        return found

    def _new(self, file: BinaryIO) -> tuple[list[bytes], bytes]:
        """The whole lines that are new, and the beginning of one that is not whole."""
        file.seek(max(0, self._end - len(self._last)))
        inode = os.fstat(file.fileno()).st_ino
        if inode != self._inode or file.read(len(self._last)) != self._last:
            self._lines, self._inode, self._end, self._number, self._last = [], inode, 0, 0, b""
            file.seek(0)
        *whole, rest = file.read().split(b"\n")
        if whole:
            self._end, self._last = self._end + sum(map(len, whole)) + len(whole), whole[-1] + b"\n"
        return whole, rest

    def _parsed(self, lines: Sequence[bytes], broken: list[str]) -> Iterator[dict[str, Any]]:
        for number, line in enumerate(lines, self._number + 1):
            try:
                found = loaded(line)
                msgspec.convert(found, _Line)
            except (ValueError, RecursionError) as error:
                if line.strip():
                    broken.append(f"line {number}: {fault(error)}")
            else:
                yield {"rows": 0, **found, **{name: _known(found.get(name, {})) for name in _FIGURES}}


def _known(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _known(value) if isinstance(value, Mapping) else value
        for name, value in figures.items()
        if value is not None
    }


def read_end(path: str | Path) -> RunEnd | None:
    """Why a run ended before its last step; None where nothing says so, or what does cannot be read."""
    return read_if_typed(RunLayout(path).end, RunEnd)


def is_abandoned(checkpoint: Path, rollbacks: Sequence[Rollback]) -> bool:
    """Whether one of these rollbacks, those of its run, has abandoned a checkpoint."""
    found = read_identity(checkpoint)
    return found is not None and any(found.steps > rollback.to for rollback in rollbacks[found.timeline :])
