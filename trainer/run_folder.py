"""The run folder: config, records, metrics and checkpoints, held by one process at a time.

RUN/run.json           what is needed to repeat the run: config, workflow, tasks, versions
RUN/records.db         every episode, call, candidate and reward
RUN/metrics.jsonl      one line per step
RUN/checkpoints/       step-000012/, and `latest`, the name of the newest complete one
"""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from cotune.errors import RunError
from cotune.storage.file_lock import FileLock
from cotune.trainer.config.train import TrainConfig

log = logging.getLogger("cotune")

_PACKAGES = ("cotune", "torch", "transformers", "peft", "openai", "langgraph", "langchain-openai", "numpy")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that a run depends on."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


class _Line(msgspec.Struct):
    """What every line of metrics.jsonl has that is read again."""

    step: int
    outcome: dict[str, float | None]
    left_out: dict[str, int]
    calls: int
    candidates: int
    groups: int


class RunFolder:
    """A run folder opened for writing; `close` releases it. Its path is absolute: the application may change the
    current folder."""

    def __init__(self, path: Path, lock: FileLock, *, own: bool = False) -> None:
        self.path = path
        self._lock = lock
        self._own = own
        self.records = path / "records.db"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"

    @classmethod
    def create(
        cls, path: str | Path, config: TrainConfig, *, workflow: str | None, tasks: str | None, **more: Any
    ) -> RunFolder:
        """Make a new run, with `more` in its run.json. Raises RunError when the folder already holds one or another
        process writes to it."""
        path = Path(path).absolute()
        try:
            path.mkdir(parents=True, exist_ok=True)
            own = not any(path.iterdir())
            folder = cls(path, FileLock(path / "lock", f"The run {path}"), own=own)
        except OSError as error:
            raise RunError(f"{path} cannot be made a run folder: {error}.", "Choose another --out.") from None
        if (path / "run.json").exists():
            folder.close()
            raise RunError(f"{path} already holds a run.", "Choose another --out, or go on with --resume.")
        described = {
            "model": config.model,
            "workflow": workflow,
            "tasks": tasks,
            "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "versions": versions(),
            "run": str(path),
            "folder": str(Path.cwd()),
            "config": msgspec.to_builtins(config),
            **more,
        }
        folder.describe_as(described)
        folder.checkpoints.mkdir(exist_ok=True)
        return folder

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Open an existing run for writing. Raises RunError when there is none or another process holds it."""
        path = Path(path).absolute()
        describe(path)
        return cls(path, FileLock(path / "lock", f"The run {path}"))

    @property
    def described(self) -> dict[str, Any]:
        """What run.json says."""
        return describe(self.path)

    def describe_as(self, described: Mapping[str, Any]) -> None:
        """Write run.json anew."""
        write_atomically(self.path / "run.json", json.dumps(described, indent=2).encode())

    @property
    def workflow(self) -> str | None:
        """Where the workflow is; None for one that was given as an object."""
        found: str | None = self.described["workflow"]
        return found

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        with self.metrics.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def truncate_metrics(self, steps: int) -> None:
        """Drop the lines of steps that the checkpoint does not know: they are done again."""
        kept = [line for line in read_metrics(self.path) if line["step"] < steps]
        write_atomically(self.metrics, "".join(json.dumps(line) + "\n" for line in kept).encode())

    def discard_unbegun(self) -> None:
        """Remove a run that ended before its first checkpoint, so that the folder is free for another try. What was
        in the folder before stays."""
        if (self.checkpoints / "latest").exists():
            return
        if self._own:
            shutil.rmtree(self.path)
        else:
            (self.path / "run.json").unlink(missing_ok=True)

    def close(self) -> None:
        self._lock.release()


def describe(path: str | Path) -> dict[str, Any]:
    """What run.json says. Raises RunError when the folder holds no run."""
    file = Path(path) / "run.json"
    if not file.is_file():
        raise RunError(f"{path} holds no run: there is no run.json.", "Name a folder that cotune train wrote.")
    try:
        described: dict[str, Any] = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise RunError(f"{file} is broken: {error}.", "Restore it, or start a new run.") from None
    return described


def read_metrics(path: str | Path) -> Iterator[dict[str, Any]]:
    """Lines of metrics.jsonl. Broken ones (a last line cut by a crash, damage) are left out, counted in the log."""
    file = Path(path) / "metrics.jsonl"
    if not file.is_file():
        return
    broken = 0
    for line in file.read_bytes().splitlines():
        try:
            found = json.loads(line)  # which takes NaN, as a figure may be
            msgspec.convert(found, _Line)
        except (ValueError, RecursionError):
            broken += bool(line.strip())
        else:
            yield found
    if broken:
        log.warning("%s: %d broken %s left out", file, broken, "line is" if broken == 1 else "lines are")


def write_atomically(path: Path, content: bytes) -> None:
    """Write, fsync and rename, so that a crash leaves the old file or the new one."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make renames inside a folder durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
