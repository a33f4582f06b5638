"""Runs programs that a model has written where they can do no harm: each in namespaces of its own, by bubblewrap.

A program sees the system's libraries and its interpreter, both read-only, and an empty scratch folder in memory that
ends with it; no network, no home, no /proc, no variables of the environment, no process but its own. Limits are set in
the kernel before its first line runs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from examples.workloads.sandbox.permission import SandboxUnavailable, cause_of, closed_part, find_tools
from examples.workloads.sandbox.system_calls import refusing_filter

SCRATCH = "/tmp"
"""Where a program may write; it starts there."""
PROGRAM = "/program.py"
NOBODY = 65534
"""The user that programs run as when root runs them: limits of processes do not bind root."""
MAIN_FOLDERS = ("/bin", "/lib", "/lib64", "/sbin")
XCPU = 128 + 24
KILLED = 128 + 9
TRIAL = "print(6 * 7)"
Ending = Literal["exit", "cpu", "wall clock"]


@dataclass(frozen=True)
class Limits:
    """What one program may use. CPU seconds and memory are each process's: with one, the default, the program's.

    The memory is address space, of which an interpreter alone takes 20 MB. No file may grow larger than the scratch
    folder. Of either output, what is beyond `output_kb` is dropped.
    """

    cpu_s: int = 2
    wall_s: float = 20.0
    memory_mb: int = 512
    processes: int = 1
    scratch_mb: int = 16
    output_kb: int = 64

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(f"limits: {name} = {value}, but it must be more than 0")


@dataclass(frozen=True)
class Ran:
    """How a program ended: by itself with `code` (128 + the number of a signal that ended it), or by a limit.

    `cut` says that it wrote more than was kept.
    """

    code: int
    ended: Ending
    stdout: str
    stderr: str
    cut: bool
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether it came to its end by itself, without an error."""
        return self.ended == "exit" and self.code == 0


class Sandbox:
    """Runs Python programs under `limits`, at most `at_once` (one per processor) at a time, from any thread.

    `python` is the interpreter that they run with: by default this process's own, or the system's where the user that
    programs run as cannot read it. Raises SandboxUnavailable, with the remedy, where bubblewrap is missing or not
    permitted: nothing is ever run without it.
    """

    def __init__(self, limits: Limits | None = None, *, python: Path | None = None, at_once: int | None = None) -> None:
        self.limits = limits or Limits()
        self.bwrap, self.prlimit, self.setpriv = find_tools("bwrap", "prlimit", "setpriv")
        self.python = python or _interpreter()
        self._filter = refusing_filter()
        self._free = threading.BoundedSemaphore(at_once or os.cpu_count() or 1)
        self._try()

    def run(self, program: str, stdin: str = "") -> Ran:
        """Run the text of a program to its end, with `stdin` to read from, and return what came of it.

        Raises SandboxUnavailable if bubblewrap did not start it.
        """
        with self._free, contextlib.ExitStack() as files:
            given = (program.encode(errors="replace"), self._filter, b"", stdin.encode(errors="replace"), b"", b"")
            script, refused, status, *streams = (_memory_file(files, content) for content in given)
            began, ended = time.monotonic(), "exit"
            process = subprocess.Popen(
                self._command(script, refused, status),
                stdin=streams[0],
                stdout=streams[1],
                stderr=streams[2],
                pass_fds=(script, refused, status),
                env={},
                cwd="/",
            )
            try:
                process.wait(self.limits.wall_s)
            except subprocess.TimeoutExpired:
                ended = "wall clock"
            finally:
                process.kill()  # bubblewrap's end is the end of all that it has started
                code = process.wait()
            if ended == "exit" and "exit-code" not in _text(status, 1 << 16)[0]:
                raise SandboxUnavailable(cause_of(_text(streams[2], 1 << 16)[0], code))
            seconds = time.monotonic() - began
            if ended == "exit" and (code == XCPU or (code == KILLED and seconds >= self.limits.cpu_s)):
                ended = "cpu"
            (stdout, more), (stderr, more_errors) = (_text(file, self.limits.output_kb * 1024) for file in streams[1:])
        return Ran(code, ended, stdout, stderr, more or more_errors, seconds)

    def _command(self, script: int, refused: int, status: int) -> list[str]:
        limits, command = self.limits, []
        if os.geteuid() == 0:
            command += [self.setpriv, f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--"]
        command += [self.bwrap, "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent"]
        command += [
            "--new-session",
            "--clearenv",
            "--cap-drop",
            "ALL",
            "--json-status-fd",
            str(status),
            "--seccomp",
            str(refused),
        ]
        command += [*_system_folders(self.python), "--ro-bind-data", str(script), PROGRAM]
        command += ["--size", str(limits.scratch_mb << 20), "--tmpfs", SCRATCH, "--remount-ro", "/"]
        command += ["--chdir", SCRATCH, self.prlimit, f"--cpu={limits.cpu_s}:{limits.cpu_s + 1}", "--core=0"]
        command += [f"--as={limits.memory_mb << 20}", f"--fsize={limits.scratch_mb << 20}", "--nofile=64"]
        command += [f"--nproc={limits.processes + 1}", "--"]  # bubblewrap's own first process counts
        return [*command, str(self.python), "-I", "-S", PROGRAM]

    def _try(self) -> None:
        found = self.run(TRIAL)
        if found.stdout != "42\n":
            raise SandboxUnavailable(cause_of(found.stderr or found.ended, found.code))


def _system_folders(python: Path) -> list[str]:
    """What a program sees of the machine's files."""
    prefix = python.parents[1]
    arguments = ["--ro-bind", "/usr", "/usr", "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for folder in map(Path, MAIN_FOLDERS):
        if folder.is_symlink():
            arguments += ["--symlink", str(folder.readlink()), str(folder)]
        elif folder.is_dir():
            arguments += ["--ro-bind", str(folder), str(folder)]
    return arguments if prefix.is_relative_to("/usr") else [*arguments, "--ro-bind", str(prefix), str(prefix)]


def _interpreter() -> Path:
    """The first that programs can read: this process's, outside of virtual environments, or the system's."""
    own = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}").resolve()
    system = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    for found in (own, Path(system).resolve() if system else None):
        if found and found.exists() and (os.geteuid() != 0 or closed_part(found) is None):
            return found
    raise SandboxUnavailable(
        f"programs run as an unprivileged user, who cannot read {own}; on Debian or Ubuntu: apt-get install python3"
    )


def _memory_file(files: contextlib.ExitStack, content: bytes) -> int:
    descriptor = os.memfd_create("sandbox")
    files.callback(os.close, descriptor)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _text(descriptor: int, most: int) -> tuple[str, bool]:
    """The first `most` bytes, and whether there are more."""
    return os.pread(descriptor, most, 0).decode(errors="replace"), os.fstat(descriptor).st_size > most
