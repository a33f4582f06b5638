"""A page of the documentation as a reader follows it: files are saved, commands pasted one by one."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests import ends_with
from tests.ports import free_port

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (\w+\.\w+)\n")
SERVERS = ("serve", "view", "gateway")
PROVIDER = ["python", "-m", "examples.tool_agent.provider"]
PORT = re.compile(r"(?<=--port )\d+|(?<=127\.0\.0\.1:)\d+")


class Reader:
    """Follows a page in a folder. `said` holds what each command printed, by the command as it stands on the page."""

    def __init__(
        self, folder: Path, environment: Mapping[str, str], smaller: Mapping[str, str], *, installs: bool = False
    ) -> None:
        self.folder, self.environment, self.smaller, self.installs = folder, dict(environment), smaller, installs
        self.said: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        self._ports: dict[str, str] = {}
        self._server: subprocess.Popen[str] | None = None

    def follow(self, page: Path) -> None:
        """Save the files of a page and run its commands, those that install where the reader `installs`. A server gives
        way to the next."""
        try:
            for language, text in BLOCK.findall(page.read_text()):
                if language == "jsonl":
                    (self.folder / "tasks.jsonl").write_text(text)
                elif language == "sh":
                    for line in text.replace("\\\n", " ").splitlines():
                        self._paste(line)
                elif found := FILE.match(text):
                    (self.folder / found[1]).write_text(self._made_smaller(text))
        finally:
            self.stop()

    def stop(self) -> None:
        """End the server in the second terminal."""
        if self._server is not None:
            self._server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._server.communicate(timeout=20)
            self._server.kill()
            self._server = None

    def _paste(self, line: str) -> None:
        words = shlex.split(line, comments=True)
        if not words or (words[0] == "pip" and not self.installs):
            return
        if words[0] == "export":
            name, _, value = words[1].partition("=")
            self.environment[name] = value
            return
        command = PORT.sub(lambda found: self._ports.setdefault(found[0], str(free_port())), line)
        command = self._made_smaller(command)
        started = time.perf_counter()
        if (words[0] == "cotune" and words[1] in SERVERS) or words[:3] == PROVIDER:
            self.stop()
            self.serve(shlex.split(command), int(self._ports[PORT.findall(line)[0]]))
        else:
            status, self.said[line] = self.run(command)
            assert status == 0, f"{command}\n{self.said[line]}"
        self.seconds[line] = time.perf_counter() - started

    def _made_smaller(self, text: str) -> str:
        for usual, here in self.smaller.items():
            text = text.replace(usual, here)
        return text

    def serve(self, words: list[str], port: int) -> None:
        """Start a server as in a second terminal, until it listens."""
        self._server = subprocess.Popen(words, preexec_fn=ends_with.this_process, **self._how())
        self._until_open(port)

    def run(self, command: str) -> tuple[int, str]:
        """Run a command in a shell; its status, and what it says."""
        done = subprocess.run(["bash", "-c", command], **self._how(), check=False)
        return done.returncode, done.stdout

    def _how(self) -> dict[str, Any]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return {"cwd": self.folder, "env": self.environment, **pipes}

    def _until_open(self, port: int) -> None:
        assert self._server is not None
        while self._server.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return
            time.sleep(0.05)
        raise AssertionError(self._server.communicate()[0])


def bare_environment(home: Path, binaries: Path) -> Iterator[tuple[str, str]]:
    """What a new user has: a home folder, a path, nothing else."""
    yield "HOME", str(home)
    yield "PATH", f"{binaries}{os.pathsep}/usr/bin{os.pathsep}/bin"
    yield "OMP_NUM_THREADS", "1"
