"""A run or a records file, opened for reading only. Files are read again when they have changed."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from cotune.algorithms.from_records import FROM_RECORDS
from cotune.algorithms.run_recipe import all_taught
from cotune.config.train import TrainConfig
from cotune.errors import CotuneError, RunError
from cotune.reading.blame import REPORT, Blame, read_blame
from cotune.reading.evaluations import StoredEvaluation, evaluation_files, read_evaluations
from cotune.reading.headline import Headline, headline
from cotune.reading.now import Now, read_now
from cotune.reading.prompt_search import PHASES as SEARCH_PHASES
from cotune.reading.prompt_search import search_headline
from cotune.reading.task_sets import held_out_set
from cotune.storage.file_lock import is_held
from cotune.storage.metrics_file import read_metrics
from cotune.storage.notes import Note, notes_file, read_notes
from cotune.storage.open_store import is_path, no_records, open_store
from cotune.storage.protocol import Store
from cotune.storage.run_layout import (
    RECORDS,
    RunDescription,
    RunEnd,
    RunLayout,
    is_run,
    read_end,
    read_run_json,
    without_values,
)
from cotune.storage.sql.figures import Figures

log = logging.getLogger("cotune")
T = TypeVar("T")


class OpenedRun:
    """A run folder, or records without a run: a file, or the address of a database. `name` is its name in addresses and
    labels."""

    def __init__(self, path: Path | str, name: str = "") -> None:
        """Open a run or records. Raises RunError if `path` is neither, or cannot be read."""
        self.name = name or plain_name(path)
        self.path = Path(self.name)
        """The run folder or the records file; for a database only its name."""
        self.folder: Path | None = None
        """The run folder, or a folder with records; None for a single file and for a database."""
        self._file: Path | None = None
        """The records file; None for a database."""
        if is_path(path):
            self.path = Path(path).absolute()
            self._file = self.path
            if self.path.is_dir():
                self.folder = self.path
                self._file = self.path / RECORDS
        self.is_run = self.folder is not None and is_run(self.folder)
        self._records_address: Path | str = self._file or str(path)
        self._store: Store | None = None
        """The records, once they were opened."""
        self._records_stat: os.stat_result | None = None
        """The records file when it was opened, to notice that it was replaced (`gone`)."""
        self._empty_store: Store | None = None
        """Stands for records that do not exist yet."""
        self._lock = threading.Lock()
        self._read: dict[str, tuple[Any, Any]] = {}
        """Cached values, each with the stamp of its file when it was read."""
        self._parts: dict[str, OpenedRun] = {}
        """The opened records of evaluations, by their folder in the run (`part`)."""
        self._folder_fd: int | None = None
        """The open folder. While it is open, no other folder gets its inode number: `gone` compares it."""
        if self.folder is not None:
            self._folder_fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            self._close_folder = weakref.finalize(self, os.close, self._folder_fd)
        if not self.is_run and self._file is not None and not self._file.is_file():
            raise RunError(f"{path} is neither a run nor a records file.", "Name a folder that cotune wrote.")
        # Reading these properties opens the records and reads run.json, so that a damaged run is refused here.
        self.figures  # noqa: B018
        self.description  # noqa: B018

    @property
    def gone(self) -> bool:
        """Whether its folder or file was removed or replaced."""
        if self._file is None:
            return False
        if self._folder_fd is not None and not _is_same(self.path, os.fstat(self._folder_fd)):
            return True
        return self._records_stat is not None and not _is_same(self._file, self._records_stat)

    @property
    def store(self) -> Store:
        """The records, opened at the first access.

        Before its first episode a run has no records file, and never if it learns from other records. Then this is an
        empty store, and the next access looks for the file again.
        """
        with self._lock:
            if self._store is None:
                is_missing = self._file is not None and not self._file.is_file()
                if is_missing:
                    if self._empty_store is None:
                        self._empty_store = no_records(self.path)
                    return self._empty_store
                self._store = open_store(self._records_address, read_only=True)
                self._records_stat = self._file.stat() if self._file else None
            return self._store

    @property
    def figures(self) -> Figures:
        """Queries of the records. Raises RunError for a store without SQL."""
        return self.store.figures()

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl by step; if a step was repeated, its last line."""
        if not self.is_run:
            return []
        return self._cached("metrics", _stamp(RunLayout(self.path).metrics), self._lines)

    def _lines(self) -> list[dict[str, Any]]:
        by_step = {line["step"]: line for line in read_metrics(self.path)}
        return [by_step[step] for step in sorted(by_step)]

    @property
    def evaluations(self) -> list[StoredEvaluation]:
        """The evaluations of the run, the oldest first."""
        if self.folder is None:
            return []
        folder = self.folder
        stamp = [(file, _stamp(file)) for file in evaluation_files(folder)]
        return self._cached("evaluations", stamp, lambda: read_evaluations(folder))

    @property
    def blame(self) -> Blame | None:
        """The result of `cotune blame` in its folder; None without one."""
        if self.folder is None:
            return None
        folder = self.folder
        return self._cached("blame", _stamp(folder / REPORT), lambda: read_blame(folder))

    @property
    def notes_file(self) -> Path | None:
        """The file with people's notes on candidates and episodes; None for a database."""
        return notes_file(self.path) if self._file else None

    @property
    def notes(self) -> dict[str, Note]:
        """People's notes, by the id of their candidate or episode."""
        file = self.notes_file
        return self._cached("notes", _stamp(file), lambda: read_notes(file)) if file else {}

    def part(self, folder: str) -> OpenedRun | None:
        """The records of an evaluation that is stored in this folder of the run, opened once. None if they cannot be
        read.
        """
        path = ""
        for evaluation in self.evaluations:
            if evaluation.records and Path(evaluation.records).name == folder:
                path = evaluation.records
                break
        if not path or Path(path).absolute() == self.path:
            return None
        with self._lock:
            try:
                if folder not in self._parts or self._parts[folder].gone:
                    self._parts[folder] = OpenedRun(Path(path), f"{self.name}:{folder}")
                return self._parts[folder]
            except CotuneError as error:
                log.warning("%s is left out: %s", path, error)
                return None

    def records_of(self, evaluation: StoredEvaluation) -> OpenedRun | None:
        """The records with the episodes of an evaluation; None without records."""
        if not evaluation.records:
            return None
        if Path(evaluation.records).absolute() == self.path:
            return self
        return self.part(Path(evaluation.records).name)

    @property
    def headline(self) -> Headline:
        """The figures of the run."""
        return self.headline_with(self.evaluations)

    def headline_with(self, evaluations: list[StoredEvaluation], until: int | None = None) -> Headline:
        """The figures of the run, or of its first `until` steps, with these evaluations instead of its own."""
        if not self.is_run and any(phase.startswith(SEARCH_PHASES) for phase in self.figures.phases()):
            return search_headline(self.folder)
        lines = [line for line in self.metrics if until is None or line["step"] < until]
        return headline(
            lines,
            evaluations,
            self.store,
            self.config.on_failure,
            taught=all_taught(self.config),
            held_out_tasks=self.held_out_tasks,
        )

    @property
    def held_out_tasks(self) -> str:
        """The name of the tasks that training evaluates on; empty if it is not known."""
        evaluation = (self.description.get("config") or {}).get("evaluation")
        file = evaluation.get("tasks") if isinstance(evaluation, dict) else None
        return held_out_set(file, self.description.get("tasks"))

    @property
    def now(self) -> Now | None:
        """The phase of the run, while it is under way."""
        return read_now(self.folder) if self.folder else None

    @property
    def description(self) -> dict[str, Any]:
        """run.json without values of environment variables; empty for records without a run."""
        if not self.is_run:
            return {}
        stamp = _stamp(RunLayout(self.path).run_json)
        return self._cached("description", stamp, lambda: without_values(read_run_json(self.path)))

    @property
    def about(self) -> RunDescription:
        """run.json as typed fields."""
        described = self.description
        return self._cached("about", described, lambda: msgspec.convert(described, RunDescription))

    @property
    def config(self) -> TrainConfig:
        """The configuration of the run; the defaults for records without a run."""
        return self.about.config

    @property
    def samples(self) -> bool:
        """Whether its policies sample answers. Otherwise they learn from records."""
        return self.config.recipe not in FROM_RECORDS

    @property
    def planned(self) -> int | None:
        """The configured number of steps; None for records without a run."""
        return self.config.steps if "steps" in (self.description.get("config") or {}) else None

    @property
    def state(self) -> str:
        """`finished`, `under way`, `failed` or `stopped` for a run; `recording` or `records` for a records file."""
        if not self.is_run:
            is_written = self._file is not None and is_held(self._file.with_name(f"{self._file.name}.lock"))
            return "recording" if is_written else "records"
        if self.now is not None:
            return "under way"
        end = self.end
        end_kind = "" if end is None else end.kind
        if end_kind == "failed":
            return "failed"
        lines = self.metrics
        if self.planned is not None and lines and lines[-1]["step"] + 1 >= self.planned:
            return "finished"
        if is_held(RunLayout(self.path).lock):  # a process trains it and has not written its phase yet
            return "under way"
        return "finished" if end_kind == "ended" else "stopped"

    @property
    def end(self) -> RunEnd | None:
        """The reason why the run ended before its last step; None if it is unknown."""
        return read_end(self.path) if self.is_run else None

    @property
    def stamp(self) -> str:
        """A text that changes when a step or a record is added."""
        metrics_stamp = _stamp(RunLayout(self.path).metrics) or ()
        return "-".join(map(str, (*self.figures.newest(), *metrics_stamp)))

    def _cached(self, name: str, stamp: Any, read: Callable[[], T]) -> T:
        """The value of `read`, which is called again only if the stamp of its file has changed."""
        if name not in self._read or self._read[name][0] != stamp:
            self._read[name] = (stamp, read())
        value: T = self._read[name][1]
        return value

    def close(self) -> None:
        """Close the records."""
        for part in self._parts.values():
            part.close()
        for store in (self._store, self._empty_store):
            if store:
                store.close()
        if self._folder_fd is not None:
            self._folder_fd = None
            self._close_folder()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def plain_name(path: Path | str) -> str:
    """The name of a folder or file, or of a database: the last part of its address."""
    if not is_path(path):
        # scheme://host/database?options
        address = str(path).partition("?")[0]
        database = address.partition("://")[2].partition("/")[2]
        return Path(database).name or "records"
    absolute = Path(path).absolute()
    if absolute.name == RECORDS:
        absolute = absolute.parent
    return absolute.name or "run"


def _is_same(path: Path, opened: os.stat_result) -> bool:
    """Whether a path still leads to the file or folder that was opened there."""
    try:
        return os.path.samestat(path.stat(), opened)
    except OSError:
        return False


def _stamp(file: Path) -> tuple[int, int] | None:
    """The size of a file and the time of its last change, which show whether it has changed; None without a file."""
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_size, stat.st_mtime_ns
