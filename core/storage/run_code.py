"""The code that a run folder names. Reading a folder loads none of it; only commands that run the application do."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cotune.storage.run_layout import is_run, read_config, read_run_json


def import_as_run_did(described: Mapping[str, Any]) -> None:
    """Find modules in the folder in which the run of this run.json was started, then in the current one, before
    installed packages.

    Call this before loading the application, a redactor or another function that run.json names, and nowhere else:
    whoever wrote run.json chooses the folder, and so the code that every later import loads.
    """
    folders = [described.get("folder"), str(Path.cwd())]
    sys.path[:0] = [folder for folder in folders if folder and folder not in sys.path]


def redactor_of(folder: Path | None) -> str:
    """The redactor that a run names for records in its folder or in that of one of its evaluations, ready to be loaded;
    "" without one."""
    run = next((one for one in (folder, folder.parent) if is_run(one)), None) if folder else None
    if run is None or not (redactor := str(read_config(run).get("redact", ""))):
        return ""
    import_as_run_did(read_run_json(run))
    return redactor
