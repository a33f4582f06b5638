"""Runs and records files to look at: those that are named, and those in folders, also ones that come later."""

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
"""Runs that are opened of a folder, the newest ones."""
DEPTH = 3
"""How far below a folder runs are looked for: `runs/demo/run` is two below `runs`."""


class FoundRuns:
    """Opened runs by name. Of a folder, one that cannot be read is left out, and the log says why."""

    def __init__(self, paths: Iterable[str | Path]) -> None:
        """Raises RunError when there is nothing to open, or a run that is named cannot be read."""
        self._paths = list(paths)
        self._lock = threading.Lock()
        self._known: set[Path | str] = set()
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
        """Open the runs that are new in the folders, and leave out those that are gone. Raises nothing for either."""
        for name, run in list(self.opened.items()):
            if run.gone:  # a page may still read it: it is closed with its last user
                self.opened.pop(name, None)
                self._known.discard(run.path)
        self._open(strict=False)

    def _open(self, *, strict: bool) -> None:
        with self._lock:
            for source, base in self._sources(strict):
                whole = source.absolute() if isinstance(source, Path) else source
                if whole in self._known:
                    continue
                try:
                    name = _name(source, base, self.opened)
                    self.opened[name] = OpenedRun(source, name)
                    self._known.add(whole)
                except (CotuneError, OSError) as error:  # just begun, or just gone: the next look tries it again
                    if strict and base is None:
                        raise
                    if whole not in self._warned:
                        log.warning("%s is left out: %s", source, error)
                    self._warned.add(whole)

    def _sources(self, strict: bool) -> Iterator[tuple[Path | str, Path | None]]:
        """What can be opened, each with the folder that it was found in, None for what was named."""
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
                continue
            found = sorted(_below(path, DEPTH), key=_changed)[-MOST_RUNS:]
            if strict and not found:
                raise RunError(
                    f"{path} and the folders in it hold no run and no records.",
                    "Name a folder that cotune train or cotune trace wrote.",
                )
            yield from ((one, path) for one in sorted(found))

    def close(self) -> None:
        """Close all of them."""
        for run in self.opened.values():
            run.close()


def open_runs(paths: Iterable[str | Path]) -> list[OpenedRun]:
    """Open runs, records files, and the runs in folders of them and below; see `FoundRuns`."""
    return list(FoundRuns(paths).opened.values())


def _below(folder: Path, depth: int) -> Iterator[Path]:
    """Folders with a run or with records, at most so far below; nothing within them."""
    try:
        inside = [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")]
    except OSError:
        return
    for path in inside:
        if holds_records(path):
            yield path
        elif depth > 1 and not path.is_symlink():
            yield from _below(path, depth - 1)


def _changed(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:  # it is gone since
        return 0.0


def holds_records(path: Path) -> bool:
    """Whether a path is a run, a recording or a records file, and not a folder of these."""
    return path.is_file() or is_run(path) or (path / RECORDS).is_file()


def _name(path: Path | str, base: Path | None, taken: Container[str]) -> str:
    """The name of a folder; of one further below `base` with the names of the folders between."""
    plain = plain_name(path)
    if base is not None:
        plain = "-".join(Path(path).absolute().relative_to(base.absolute()).parts)
    wanted, number = plain, 2
    while wanted in taken:
        wanted, number = f"{plain}-{number}", number + 1
    return wanted
