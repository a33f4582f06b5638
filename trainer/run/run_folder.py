"""The run folder, opened for writing by the process that trains. `storage.run_layout` names and reads its files."""

from __future__ import annotations

import contextlib
import json
import platform
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from cotune.config.train import TrainConfig
from cotune.errors import CotuneError, RunError, error_text
from cotune.integrations.versions import versions_of_installed
from cotune.reading.evaluations import drop_after
from cotune.records.ids import new_id
from cotune.storage.file_lock import FileLock
from cotune.storage.metrics_file import read_metrics
from cotune.storage.run_code import orders_of_run, remember_orders
from cotune.storage.run_layout import RunEnd, RunLayout, read_config, read_run_json
from cotune.storage.whole_file import is_full, system_error_message, whole_file
from cotune.trainer.config.withheld import without_variables

_PACKAGES = ("cotune", "torch", "transformers", "peft", "openai", "langgraph", "langchain-openai", "numpy")


class RunFolder(RunLayout):
    """A run folder opened for writing; `close` releases it. Its path is absolute, because the application may change
    the current folder."""

    def __init__(self, path: Path, *, was_empty: bool = False) -> None:
        """Lock the folder. `was_empty` says that it is new, or was empty before this run. Raises RunError if another
        process has locked it."""
        super().__init__(path)
        self._lock = FileLock(self.lock, f"The run {path}")
        self._was_empty = was_empty
        self.trusted = False
        """Whether this user made the run, or agreed to the code and the addresses that it names."""

    @classmethod
    def create(
        cls, path: str | Path, config: TrainConfig, *, workflow: str | None, tasks: str | None, **more: Any
    ) -> RunFolder:
        """Create a new run in the folder `path`. `more` are further entries of its run.json. Raises RunError if the
        folder already holds a run, or another process writes to it."""
        target = Path(path).absolute()
        try:
            target.mkdir(parents=True, exist_ok=True)
            was_empty = not any(target.iterdir())
            folder = cls(target, was_empty=was_empty)
        except OSError as error:
            raise RunError(
                f"{target} cannot be used as a run folder: {error.strerror or error}.", "Choose another --out."
            ) from None
        if folder.run_json.exists():
            folder.close()
            raise RunError(f"{target} already holds a run.", "Choose another --out, or continue the run with --resume.")
        # The entries of run.json. Relative paths of the command line start in "folder".
        description = {
            "id": new_id(),
            "model": config.model,
            "workflow": workflow,
            "tasks": tasks,
            "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "versions": {"python": platform.python_version(), **versions_of_installed(_PACKAGES)},
            "run": str(target),
            "folder": str(Path.cwd()),
            "config": without_variables(config),
            **more,
        }
        folder.trusted = True
        try:
            folder.describe_as(description)
            folder.checkpoints.mkdir(exist_ok=True)
        except BaseException:
            # Leave no half-made run, which would keep the user from using the folder again.
            folder.close()
            if was_empty:
                shutil.rmtree(target, ignore_errors=True)
            raise
        return folder

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Open an existing run for writing. Raises RunError if there is none, or another process writes to it."""
        read_config(path)
        path = Path(path).absolute()
        return cls(path)

    @property
    def described(self) -> dict[str, Any]:
        """The content of run.json."""
        return read_run_json(self.path)

    def describe_as(self, described: Mapping[str, Any]) -> None:
        """Replace the content of run.json. If the user trusts the folder, the code and the addresses that it names now
        are trusted too."""
        write_atomically(self.run_json, json.dumps(described, indent=2).encode())
        if self.trusted:
            remember_orders(orders_of_run(self.path, described))

    @property
    def workflow(self) -> str | None:
        """The address of the workflow; None if the run was started with an object."""
        address: str | None = self.described["workflow"]
        return address

    @property
    def way_on(self) -> str:
        """What to do after a failure, as a part of a sentence. A run without a checkpoint has nothing to continue."""
        return f"continue with: cotune train --resume {self.path}" if self.latest.exists() else "start the run again"

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        with self.metrics.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def truncate_metrics(self, steps: int) -> None:
        """Remove the metrics and the evaluations of steps after the first `steps` ones. These steps are not in the
        checkpoint, so they are repeated."""
        drop_after(self.path, steps)
        self._write_metrics(line for line in read_metrics(self.path) if line["step"] < steps)

    def revise_held_out(self, figures: Mapping[int, Mapping[str, float]]) -> None:
        """Replace held-out figures in metrics.jsonl. `figures` has the new ones by the number of steps done. Other
        figures of these lines do not change."""
        lines: list[dict[str, Any]] = []
        for line in read_metrics(self.path):
            steps_done = line["step"] + 1  # steps are numbered from 0
            held_out = {**line["held_out"], **figures.get(steps_done, {})}
            lines.append({**line, "held_out": held_out})
        self._write_metrics(lines)

    def _write_metrics(self, lines: Iterable[Mapping[str, Any]]) -> None:
        write_atomically(self.metrics, "".join(json.dumps(line) + "\n" for line in lines).encode())

    def discard_unbegun(self) -> None:
        """Remove a run that ended before its first checkpoint, so that the folder is free for another run. Files that
        were in the folder before the run stay."""
        if self.latest.exists() or not self.run_json.exists():
            return
        if self._was_empty:
            shutil.rmtree(self.path)
        else:
            self.run_json.unlink(missing_ok=True)

    def note_end(self, kind: Literal["failed", "stopped", "ended"], cause: str, remedy: str = "") -> None:
        """Write why the run ends, for `cotune show`. A folder that cannot be written, for example because its disk is
        full, stays as it is."""
        with contextlib.suppress(OSError):
            write_atomically(self.end, msgspec.json.encode(RunEnd(kind=kind, cause=cause, remedy=remedy)))

    @contextlib.contextmanager
    def noting_errors(self) -> Iterator[None]:
        """Write any error inside the block into the folder (`note_end`). If the cause is that the folder is gone or its
        disk is full, raise a RunError that says so."""
        self.end.unlink(missing_ok=True)
        try:
            yield
        except BaseException as error:
            reported = self._explain_error(error)
            if self.run_json.exists():
                if isinstance(reported, CotuneError):
                    self.note_end("failed", reported.cause, reported.remedy)
                elif isinstance(reported, Exception):
                    self.note_end("failed", error_text(reported))
                else:
                    self.note_end("stopped", "It was interrupted.")
            if reported is error:
                raise
            raise reported from error

    def _explain_error(self, error: BaseException) -> BaseException:
        """Return a RunError if the folder or its disk is the cause of the error; otherwise the error itself."""
        if isinstance(error, CotuneError | OSError):
            if not self.run_json.exists():
                cause = f"The run folder {self.path} was removed or moved while the run wrote to it."
                remedy = f"Put it back and continue with: cotune train --resume {self.path}; or start a new run."
                return RunError(cause, remedy)
            if isinstance(error, OSError) and is_full(error):
                return RunError(system_error_message(error, self.way_on))
        return error

    def close(self) -> None:
        self._lock.release()


def write_atomically(path: Path, content: bytes) -> None:
    """Write, fsync and rename, so that a crash leaves the old file or the new one."""
    with whole_file(path) as file:
        file.write(content)
