"""Tries grammars in another process before anything here compiles them: a schema of a few bytes may ask for more memory
than there is, and the library then ends its process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import weakref
from typing import Any

from cotune.errors import RequestRefused
from cotune.integrations.models.chat import grammar_worker
from cotune.runtime.bounded_cache import BoundedCache
from cotune.runtime.forks import survives_fork

MOST_TEXT = 1 << 20
"""Most characters of a grammar."""
REMEDY = "Take this out of the schema, or ask for plain text and check the reply."


class Trials:
    """Grammars tried with one tokenizer (`described` as `grammar_worker.opened` reads it; None: only compiled).

    One process is kept, and started again where it has ended. Safe to use from several threads.
    """

    def __init__(self, described: dict[str, Any] | None) -> None:
        self._described = described
        self._known: BoundedCache[str] = BoundedCache(4096, 32 << 20)
        self._lock = threading.Lock()
        self._worker: subprocess.Popen[str] | None = None
        survives_fork(self)

    def after_fork(self) -> None:
        """In a forked child: a process of its own."""
        self._lock, self._worker = threading.Lock(), None

    def check(self, grammar: str) -> None:
        """Raises RequestRefused for a grammar that cannot be compiled, or only with too much time or memory."""
        if fault := self.fault(grammar):
            raise RequestRefused(f"The form that the request asks for cannot be enforced: {fault}.", REMEDY)

    def fault(self, grammar: str) -> str:
        """Why `check` refuses a grammar; "" where it does not."""
        if len(grammar) > MOST_TEXT:
            return f"its schemas take {len(grammar)} characters, and at most {MOST_TEXT} are read"
        known = self._known.get(grammar)
        if known is None:
            with self._lock:
                answer, ended = self._ask(grammar)
            if ended:  # which may be otherwise the next time
                return f"the process that tries it ended ({ended})"
            known = reason(answer)
            self._known.put(grammar, known, 2 * len(grammar) + len(known))
        return known

    def open(self) -> None:
        """Start the process now: reading a tokenizer takes seconds."""
        self.fault("start: /./")

    def _ask(self, grammar: str) -> tuple[str, str]:
        """What the process answers; or nothing, and why it has ended."""
        ended = ""
        for _ in range(2):
            try:
                worker = self._running()
                assert worker.stdin is not None and worker.stdout is not None
                worker.stdin.write(json.dumps(grammar) + "\n")
                worker.stdin.flush()
                if answer := worker.stdout.readline():
                    return str(json.loads(answer)), ""
            except OSError as error:
                ended = str(error)
            if self._worker is not None:
                _end(self._worker, os.getpid())
                ended = f"status {self._worker.returncode}"
                self._worker = None
        return "", ended

    def _running(self) -> subprocess.Popen[str]:
        if self._worker is None:
            # Without the folders that this process imports from: it needs llguidance alone.
            command = [sys.executable, "-P", grammar_worker.__file__]
            environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}  # it forks, so it has one thread
            self._worker = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
            )
            weakref.finalize(self, _end, self._worker, os.getpid())
            assert self._worker.stdin is not None
            self._worker.stdin.write(json.dumps(self._described) + "\n")
        return self._worker


def reason(error: str) -> str:
    """The first line of what llguidance says, without the place in the grammar, which is ours; "" for none."""
    line = next((line for line in error.splitlines() if line.strip()), "").strip()
    return line.partition("): ")[2].rstrip(".") or line


def _end(worker: subprocess.Popen[str], owner: int) -> None:
    if os.getpid() == owner:  # and no fork of it
        worker.kill()
        worker.communicate()
