"""What a process that computes with torch does: spans with names, and the operators of the first of each name."""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from cotune.step_profile import Span, Trace

OPERATOR_SPANS = 2
"""Spans of each name whose operators are kept: a step has thousands, and a trace of all would take gigabytes."""
MOST_OPERATORS = 50_000
"""Events of operators that a process keeps, at most."""
_SESSION = threading.Lock()
"""torch can profile once at a time in a process, which may have a learner and a sampler."""


class Tracer:
    """Names spans of the work of one thread at a time; keeps them between `begin` and `end` only."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[Span] | None = None
        self._seen: Counter[str] = Counter()
        self._files: list[Path] = []
        self._fault = ""
        """Why operators are missing."""

    def begin(self) -> None:
        """Start to trace. The profiler's own start, which takes seconds, is done here."""
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it reports each session on standard error otherwise
        self._fault = ""
        with _SESSION:
            session = self._started()
            if session is not None:
                session.stop()
        self._seen.clear()
        self._spans = []

    def end(self) -> Trace:
        """All since `begin`."""
        spans, self._spans = self._spans or [], None
        files, self._files = self._files, []
        operators = [event for file in files for event in _operators(file)]
        notes = (f"torch's profiler failed, and operators are missing: {self._fault}",) if self._fault else ()
        return Trace(spans, operators[:MOST_OPERATORS], max(0, len(operators) - MOST_OPERATORS), notes)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """What is inside is a span of this name."""
        if self._spans is None:
            yield
            return
        self._seen[name] += 1
        session = self._start() if self._seen[name] <= OPERATOR_SPANS else None
        began = time.time()
        try:
            yield
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        finally:
            self._add(name, began)
            if session is not None:
                self._stop(session)

    def _add(self, name: str, began: float) -> None:
        if self._spans is not None:
            self._spans.append(Span(name, began, time.time(), os.getpid(), threading.get_native_id()))

    def _profiler(self) -> Any:
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        return torch.profiler.profile(activities=kinds)

    def _started(self) -> Any:
        """A session that has started, or None where it cannot: what is traced goes on without."""
        try:
            session = self._profiler()
            session.start()
            return session
        except Exception as error:  # noqa: BLE001
            self._failed(error)
            return None

    def _failed(self, error: Exception) -> None:
        self._fault = f"{type(error).__name__}: {error}".splitlines()[0]

    def _start(self) -> Any:
        if not _SESSION.acquire(blocking=False):
            return None
        began = time.time()
        session = self._started()
        if session is None:
            _SESSION.release()
        self._add("profiler", began)
        return session

    def _stop(self, session: Any) -> None:
        began = time.time()
        try:
            session.stop()
            handle, name = tempfile.mkstemp(suffix=".json")
            os.close(handle)
            session.export_chrome_trace(name)
            self._files.append(Path(name))
        except Exception as error:  # noqa: BLE001
            self._failed(error)
        finally:
            _SESSION.release()
            self._add("profiler", began)


def _operators(file: Path) -> list[dict[str, Any]]:
    """Events of an exported trace, at microseconds since 1970. The file is removed."""
    found = json.loads(file.read_text())
    file.unlink()
    base = found.get("baseTimeNanoseconds", 0) / 1e3
    kept = ("name", "cat", "pid", "tid", "dur")
    return [
        {"ph": "X", "ts": event["ts"] + base, **{key: event[key] for key in kept if key in event}}
        for event in found["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") not in (None, "Trace")
    ]
