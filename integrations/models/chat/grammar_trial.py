"""Tries grammars in another process before this one compiles them.

A schema of a few bytes may need more memory than the machine has. The library then ends its process.
"""

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
NOT_ENFORCEABLE = "The structured output of the request cannot be enforced"
REMEDY = "Remove the named feature from the schema, or ask for plain text and check the reply."
"""The beginning of the message about a grammar that is refused, and its remedy."""


class Trials:
    """Tries grammars with one tokenizer, in one process that is started again if it has ended.

    `description` is the description of the tokenizer for `grammar_worker.open_tokenizer`; with None, grammars are only
    checked without a tokenizer. Safe to use from several threads.
    """

    def __init__(self, description: dict[str, Any] | None) -> None:
        self._description = description
        self._faults: BoundedCache[str] = BoundedCache(4096, 32 << 20)
        """Grammar -> its fault; empty for one that can be used."""
        self._lock = threading.Lock()
        self._worker: subprocess.Popen[str] | None = None
        survives_fork(self)

    def after_fork(self) -> None:
        """Forget the parent's process in a forked child, which starts another one."""
        self._lock = threading.Lock()
        self._worker = None

    def check(self, grammar: str) -> None:
        """Raise RequestRefused for a grammar that cannot be compiled, or only with too much time or memory."""
        if fault := self.fault(grammar):
            raise RequestRefused(f"{NOT_ENFORCEABLE}: {fault}.", REMEDY)

    def fault(self, grammar: str) -> str:
        """The reason why llguidance refuses a grammar; empty if it accepts it. The grammar is tried in another process,
        as a bad one can take all memory or time. Results are cached.
        """
        if len(grammar) > MOST_TEXT:
            return f"its schemas take {len(grammar)} characters, and at most {MOST_TEXT} are read"
        fault = self._faults.get(grammar)
        if fault is None:
            with self._lock:
                answer, reason_of_end = self._ask(grammar)
            if reason_of_end:  # not cached: the next trial may succeed
                return f"the process that tries it ended ({reason_of_end})"
            fault = first_error_line(answer)
            self._faults.put(grammar, fault, 2 * len(grammar) + len(fault))
        return fault

    def open(self) -> None:
        """Start the process now, because reading a tokenizer takes seconds."""
        self.fault("start: /./")

    def _ask(self, grammar: str) -> tuple[str, str]:
        """The answer of the process, and ""; or an empty answer, and the reason why the process has ended.

        The process may have ended before it got the grammar, so the grammar is sent to a new one once more.
        """
        reason_of_end = ""
        for _attempt in range(2):
            try:
                worker = self._running()
                assert worker.stdin is not None and worker.stdout is not None
                worker.stdin.write(json.dumps(grammar) + "\n")
                worker.stdin.flush()
                if answer := worker.stdout.readline():
                    return str(json.loads(answer)), ""
            except OSError as error:
                reason_of_end = str(error)
            if self._worker is not None:
                _end_worker(self._worker, os.getpid())
                reason_of_end = f"status {self._worker.returncode}"
                self._worker = None
        return "", reason_of_end

    def _running(self) -> subprocess.Popen[str]:
        """The process that tries grammars, started at the first use and again after it has ended."""
        if self._worker is None:
            # -P: do not import from the script's folder, whose modules have common names.
            command = [sys.executable, "-P", grammar_worker.__file__]
            # The process forks, so it must have only one thread.
            environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
            self._worker = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
            )
            weakref.finalize(self, _end_worker, self._worker, os.getpid())
            assert self._worker.stdin is not None
            self._worker.stdin.write(json.dumps(self._description) + "\n")
        return self._worker


def first_error_line(error: str) -> str:
    """The first line of llguidance's error, without the place in the grammar, which means nothing to the user."""
    line = next((line for line in error.splitlines() if line.strip()), "").strip()
    return line.partition("): ")[2].rstrip(".") or line


def _end_worker(worker: subprocess.Popen[str], owner: int) -> None:
    # A fork of the owner must not end the process.
    if os.getpid() == owner:
        worker.kill()
        worker.communicate()
