"""Find runs and records files: the named ones, and those in named folders, including runs that appear later."""

from __future__ import annotations

import logging
import threading
from collections.abc import Container, Iterable, Iterator
from pathlib import Path

from cotune.errors import CotuneError, RunError
from cotune.reading.run import OpenedRun, plain_name
from cotune.storage.open_store import is_path
from cotune.storage.run_layout import RECORDS, is_run

log = logging.getLogger("cotune")

MOST_RUNS = 200
"""Maximum number of runs that are opened in a folder, the newest ones."""
DEPTH = 3
"""Levels of folders in which runs are searched: `runs/demo/run` is two levels below `runs`."""


class FoundRuns:
    """Opened runs by name. A run in a folder that cannot be read is left out, with the reason in the log."""

    def __init__(self, paths: Iterable[str | Path]) -> None:
        """Open runs. Raises RunError if there is nothing to open, or a named run cannot be read."""
        self._paths = list(paths)
        self._lock = threading.Lock()
        self._opened_paths: set[Path | str] = set()
        self._warned: set[Path | str] = set()
        self.opened: dict[str, OpenedRun] = {}
        try:
            self._open(strict=True)
        except CotuneError:
            self.close()
            raise
        if not self.opened:
            raise RunError("None of these runs can be read.", "The log above says why.")

    def look_again(self) -> None:
        """Open new runs in the folders, and forget removed ones. Runs that cannot be read raise no error here."""
        for name, run in list(self.opened.items()):
            if run.gone:  # not closed here: a page may still read it. It is closed with its last user.
                self.opened.pop(name, None)
                self._opened_paths.discard(run.path)
        self._open(strict=False)

    def _open(self, *, strict: bool) -> None:
        """Open runs and records files that are not open yet. With `strict`, a named one that cannot be read is an
        error."""
        with self._lock:
            for source, base in self._sources(strict):
                address = source.absolute() if isinstance(source, Path) else source
                if address in self._opened_paths:
                    continue
                try:
                    name = _name(source, base, self.opened)
                    self.opened[name] = OpenedRun(source, name)
                    self._opened_paths.add(address)
                except (CotuneError, OSError) as error:  # perhaps just started or removed: the next look tries again
                    if strict and base is None:
                        raise
                    if address not in self._warned:
                        log.warning("%s is left out: %s", source, error)
                    self._warned.add(address)

    def _sources(self, strict: bool) -> Iterator[tuple[Path | str, Path | None]]:
        """The runs and stores to open, each with the folder that the user named and in which it was found; None for one
        that was named directly.
        """
        for address in self._paths:
            if not is_path(address):
                yield str(address), None
                continue
            path = Path(address)
            if holds_records(path):
                yield path, None
                continue
            if not path.is_dir():
                if strict:
                    raise RunError(
                        f"There is no run at {path}.", "Name a run folder, a records file, or a folder of runs."
                    )
                continue  # it was removed, and may come back
            newest = sorted(_run_folders_below(path, DEPTH), key=_changed)[-MOST_RUNS:]
            if strict and not newest:
                raise RunError(
                    f"{path} and the folders in it hold no run and no records.",
                    "Name a folder that cotune train or cotune trace wrote.",
                )
            for run in sorted(newest):
                yield run, path

    def close(self) -> None:
        """Close all runs."""
        for run in self.opened.values():
            run.close()


def open_runs(paths: Iterable[str | Path]) -> list[OpenedRun]:
    """Open runs, records files, and the runs in folders; see `FoundRuns`."""
    return list(FoundRuns(paths).opened.values())


def _run_folders_below(folder: Path, depth: int) -> Iterator[Path]:
    """Folders with a run or with records, at most `depth` levels below `folder`. Folders inside a run are skipped."""
    try:
        folders = [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")]
    except OSError:  # it may not be read, or was removed meanwhile: the other folders are still searched
        return
    for path in folders:
        if holds_records(path):
            yield path
        elif depth > 1 and not path.is_symlink():
            yield from _run_folders_below(path, depth - 1)


def _changed(folder: Path) -> float:
    """The time of the last change in a folder, as a Unix time."""
    try:
        return folder.stat().st_mtime
    except OSError:  # it was removed meanwhile
        return 0.0


def holds_records(path: Path) -> bool:
    """Whether a path is a run, a recording or a records file, and not a folder of these."""
    return path.is_file() or is_run(path) or (path / RECORDS).is_file()


def _name(path: Path | str, base: Path | None, used_names: Container[str]) -> str:
    """A name for a run that no other run has: its folders below `base`, joined by hyphens, or else its own folder. A
    number is added to a name in `used_names`.
    """
    plain = plain_name(path)
    if base is not None:
        plain = "-".join(Path(path).absolute().relative_to(base.absolute()).parts)
    name = plain
    number = 1
    while name in used_names:
        number += 1
        name = f"{plain}-{number}"
    return name
