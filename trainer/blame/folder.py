"""The folder of an analysis: locked while it runs, and described in blame.json to be continued."""

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
GROWING_FIELDS = ("tasks", "recorded")
"""Fields of blame.json that a larger limit makes longer."""


@contextlib.contextmanager
def open_folder(
    layout: RunLayout, app: Workflow, address: str, drawn: TasksToAnalyse, options: BlameOptions
) -> Iterator[None]:
    """Create the folder of an analysis, or open it to continue the same analysis, and lock it while it is in use.

    Writes blame.json with everything that decides the runs. `address` is the name of the workflow (app:solve), or "" if
    it was passed as an object. Raises ConfigError if the folder holds another analysis or records of something else.
    """
    description: dict[str, Any] = {
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
            _check_same(options.out, earlier, description)
            # With a smaller limit than before, the tasks beyond it stay part of the analysis.
            for name in GROWING_FIELDS:
                if len(earlier.get(name) or []) > len(description[name]):
                    description[name] = earlier[name]
        write_atomically(file, json.dumps(description, indent=2).encode())
        if address:
            write_trace(layout.path, address, {"roles_by": options.roles_by}, holds_records=layout.records.exists())
        yield
    finally:
        lock.release()


def _check_same(out: str, earlier: Mapping[str, Any], description: Mapping[str, Any]) -> None:
    """Raise ConfigError if the folder `out` holds an `earlier` analysis that differs from this one in more than the
    number of its tasks."""
    fault = ""
    for name, value in description.items():
        before = earlier.get(name)
        if name in GROWING_FIELDS:
            # A larger limit adds tasks at the end, so only the first ones are compared.
            before = before or []
            in_both = min(len(value), len(before))
            if value[:in_both] != before[:in_both]:
                fault = f"holds an analysis of other {'tasks' if name == 'tasks' else 'episodes'}"
        elif value != before:
            fault = f"holds an analysis with {name} = {before!r}, not {value!r}"
        if fault:
            raise ConfigError("out", out, fault, "Name a new folder with --out.")
