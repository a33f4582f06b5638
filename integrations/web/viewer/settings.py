"""The configuration of runs, flat, and where runs differ in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from cotune.integrations.web.viewer.opened import OpenedRun
from cotune.storage.run_layout import leaves


class Setting(msgspec.Struct, frozen=True):
    """A field with its value in each run; `differs` where they are not all the same."""

    name: str
    values: tuple[str, ...]
    differs: bool


def settings(runs: Sequence[OpenedRun]) -> list[Setting]:
    """Every field of the runs' configurations, and their model, tasks, workflow and versions of packages."""
    tables = [{name: _text(value) for name, value in leaves(_told(run))} for run in runs]
    names = sorted({name for table in tables for name in table}, key=lambda name: (name.startswith("versions."), name))
    found = []
    for name in names:
        values = tuple(table.get(name, "–") for table in tables)
        found.append(Setting(name, values, len(set(values)) > 1))
    return found


def _told(run: OpenedRun) -> dict[str, Any]:
    told = run.description
    about = {name: told[name] for name in ("workflow", "tasks", "versions", "changes") if told.get(name)}
    return {**run.config, **about}


def _text(value: Any) -> str:
    return (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)) or "–"
