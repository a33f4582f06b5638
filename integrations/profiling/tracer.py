"""Notes the work of a process that computes with torch: spans, and the operators of the first spans of each name."""

from __future__ import annotations

import functools
import json
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from cotune.errors import error_line
from cotune.integrations.profiling.spans import Span, Trace

OPERATOR_SPANS = 2
"""Spans of each name whose operators are kept: a step has thousands, and a trace of all would take gigabytes."""
MOST_OPERATORS = 50_000
"""Most events of operators that a process keeps."""
_SESSION = threading.Lock()
"""torch can profile once at a time in a process, which may have a learner and a sampler."""


class Tracer:
    """Names spans of the work of one thread at a time; keeps them between `begin` and `end` only."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[Span] | None = None
        self._seen: Counter[str] = Counter()
        self._files: list[Path] = []
        self._watched: list[tuple[Any, str]] = []
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

    def watch(self, place: Any, method: str, name: Callable[..., str]) -> None:
        """Until `end`, each call of a method is a span; `name` gives its name from the first argument, "" for none."""
        original = getattr(place, method)

        @functools.wraps(original)
        def watched(*arguments: Any, **named: Any) -> Any:
            if not (span := name(*arguments[:1])):
                return original(*arguments, **named)
            with self.span(span):
                return original(*arguments, **named)

        setattr(place, method, watched)
        self._watched.append((place, method))

    def end(self) -> Trace:
        """All since `begin`."""
        for place, method in self._watched:
            vars(place).pop(method, None)
        spans, self._spans = self._spans or [], None
        files, self._files, self._watched = self._files, [], []
        operators = [event for file in files for event in _operators(file)]
        notes = (f"torch's profiler failed, and operators are missing: {self._fault}",) if self._fault else ()
        return Trace(spans, operators[:MOST_OPERATORS], max(0, len(operators) - MOST_OPERATORS), notes)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """The body is a span of this name."""
        if self._spans is None:
            yield
            return
        self._seen[name] += 1
        session = None
        if self._seen[name] <= OPERATOR_SPANS and _SESSION.acquire(blocking=False):
            with self._noted("profiler"):
                session = self._started()
            if session is None:
                _SESSION.release()
        try:
            with self._noted(name):
                yield
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
        finally:
            if session is not None:
                with self._noted("profiler"):
                    self._stop(session)

    @contextmanager
    def _noted(self, name: str) -> Iterator[None]:
        began = time.time()
        try:
            yield
        finally:
            if self._spans is not None:
                self._spans.append(Span(name, began, time.time(), os.getpid(), threading.get_native_id()))

    def _started(self) -> Any:
        """A session of torch's profiler, or None where it does not start: the trace then lacks operators."""
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        try:
            session = torch.profiler.profile(activities=kinds)
            session.start()
            return session
        except Exception as error:  # noqa: BLE001
            self._fault = error_line(error)
            return None

    def _stop(self, session: Any) -> None:
        try:
            session.stop()
            handle, name = tempfile.mkstemp(suffix=".json")
            os.close(handle)
            session.export_chrome_trace(name)
            self._files.append(Path(name))
        except Exception as error:  # noqa: BLE001
            self._fault = error_line(error)
        finally:
            _SESSION.release()


def _operators(file: Path) -> list[dict[str, Any]]:
    """Events of an exported trace, at microseconds since 1970. The file is removed."""
    exported = json.loads(file.read_text())
    file.unlink()
    base = exported.get("baseTimeNanoseconds", 0) / 1e3
    kept = ("name", "cat", "pid", "tid", "dur")
    return [
        {"ph": "X", "ts": event["ts"] + base, **{key: event[key] for key in kept if key in event}}
        for event in exported["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") not in (None, "Trace")
    ]
