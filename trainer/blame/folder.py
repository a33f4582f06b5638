"""The folder of an analysis: held while it runs, and described in blame.json, so that the same command continues it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from cotune.episodes.workflows import Workflow
from cotune.errors import ConfigError
from cotune.storage.file_lock import FileLock
from cotune.storage.run_layout import RunLayout
from cotune.storage.trace_file import write_trace
from cotune.storage.typed_json import read_if_typed
from cotune.trainer.blame.options import BlameOptions
from cotune.trainer.blame.tasks import TasksToAnalyse
from cotune.trainer.run.run_folder import write_atomically

FILE = "blame.json"
GROWING = ("tasks", "recorded")
"""Fields of blame.json that a larger limit makes longer."""


@contextlib.contextmanager
def opened(
    layout: RunLayout, app: Workflow, address: str, drawn: TasksToAnalyse, options: BlameOptions
) -> Iterator[None]:
    """The folder of an analysis, held: a new one, or that of the same analysis. Raises ConfigError for another one."""
    described: dict[str, Any] = {
        "workflow": app.name,
        "references": sorted(options.references),
        "without": sorted(options.without),
        "model": options.model,
        "temperature": options.temperature,
        "tools": options.tools,
        "max_tokens": options.max_tokens,
        "roles_by": options.roles_by,
        "seed": options.seed,
        "from_records": bool(drawn.recorded),
        "tasks": [task.id for task in drawn.tasks],
        "recorded": list(drawn.recorded),
    }
    file = layout.path / FILE
    layout.path.mkdir(parents=True, exist_ok=True)
    lock = FileLock(layout.path / "blame.lock", f"The analysis {layout.path}")
    try:
        earlier = read_if_typed(file, dict[str, Any])
        if earlier is None and layout.records.exists():
            raise ConfigError("out", options.out, "holds records of something else", "Name a new folder with --out.")
        if earlier is not None:
            _check_same(options.out, earlier, described)
            # With a smaller limit than before, the further tasks stay part of the analysis.
            for name in GROWING:
                if len(earlier.get(name) or []) > len(described[name]):
                    described[name] = earlier[name]
        write_atomically(file, json.dumps(described, indent=2).encode())
        if address:
            write_trace(layout.path, address, {"roles_by": options.roles_by}, holds_records=layout.records.exists())
        yield
    finally:
        lock.release()


def _check_same(out: str, earlier: Mapping[str, Any], described: Mapping[str, Any]) -> None:
    """Raise ConfigError unless a folder holds the analysis that is described now, on as many tasks or others."""
    for name, value in described.items():
        before = earlier.get(name)
        if name in GROWING:
            # A larger limit adds tasks at the end.
            shared = min(len(value), len(before or ()))
            if value[:shared] == (before or [])[:shared]:
                continue
            fault = "holds an analysis of other tasks" if name == "tasks" else "holds an analysis of other episodes"
        elif value == before:
            continue
        else:
            fault = f"holds an analysis with {name} = {before!r}, not {value!r}"
        raise ConfigError("out", out, fault, "Name a new folder with --out.")
