"""A PostgreSQL server of the tests' own, in a temporary folder, as a user without rights."""

from __future__ import annotations

import contextlib
import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

INSTALL = "The store's tests need PostgreSQL. On Debian, as root: apt-get install postgresql"


def programs() -> Path:
    """The folder of initdb and postgres, of the newest version that is installed. Fails the test without one."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if found:
        return found[-1].parent
    if path := shutil.which("initdb"):
        return Path(path).resolve().parent
    pytest.fail(INSTALL)


class Server:
    """One server. It listens on a socket in its folder alone, and trusts who can reach that. Unless it is `durable`, a
    commit does not wait for the disk."""

    def __init__(self, folder: Path, durable: bool = False) -> None:
        self.folder = folder
        self._fsync = f"fsync={'on' if durable else 'off'}"
        self._bin = programs()
        self._as: list[str] = []
        self._names = itertools.count()
        self._process: subprocess.Popen[bytes] | None = None
        if os.geteuid() == 0:  # PostgreSQL refuses to run as root
            names = {entry.pw_name for entry in pwd.getpwall()}
            user = pwd.getpwnam("postgres" if "postgres" in names else "nobody")
            self._as = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
            os.chown(folder, user.pw_uid, user.pw_gid)
        self._run("initdb", "-D", folder / "data", "-U", "cotune", "-A", "trust", "-E", "UTF8", "--no-sync")
        self.start()

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        options = ["-c", "listen_addresses=", "-c", f"unix_socket_directories={self.folder}", "-c", self._fsync]
        log = (self.folder / "log").open("ab")
        command = [*self._as, self._bin / "postgres", "-D", self.folder / "data", *options]
        self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd="/")
        log.close()
        ready = ["pg_isready", "-h", self.folder, "-t", "1"]
        while self._run(*ready, check=False) != 0:
            if self._process.poll() is not None:
                pytest.fail((self.folder / "log").read_text())

    def database(self) -> str:
        """The address of a new store, in a schema of its own."""
        return f"postgresql://cotune@/postgres?host={self.folder}&options=-csearch_path%3Dtest{next(self._names)}"

    def stop(self, how: str = "fast") -> None:
        """Stop it: `fast`, or `immediate`, as after a loss of power."""
        self._run("pg_ctl", "-D", self.folder / "data", "-m", how, "-w", "stop", check=False)
        if self._process:
            self._process.wait()

    def _run(self, program: str, *arguments: object, check: bool = True) -> int:
        command = [*self._as, self._bin / program, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, cwd="/", check=False)
        assert done.returncode == 0 or not check, done.stderr
        return done.returncode


@contextlib.contextmanager
def server(durable: bool = False) -> Iterator[Server]:
    """A server, for as long as the block runs."""
    with tempfile.TemporaryDirectory(prefix="cotune-pg-", ignore_cleanup_errors=True) as folder:
        opened = Server(Path(folder), durable)
        try:
            yield opened
        finally:
            opened.stop("immediate")
