"""trace.json of a folder that `cotune trace` wrote: the application that made its records, for commands that run it
again.

It has the fields of run.json that name code, so that the same rules decide whether they are obeyed (`run_code`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cotune.storage.run_code import orders_of_run, remember
from cotune.storage.run_layout import whole_address
from cotune.storage.typed_json import read_if_typed
from cotune.storage.whole_file import whole_file

_NAME = "trace.json"


def write_trace(folder: Path, workflow: str, config: Mapping[str, str | None], *, holds_records: bool) -> None:
    """Keep which application records into this folder. `config` has its functions: `redact` and `roles_by`.

    If the folder holds records already, of another application or of an unknown one, none is kept: nothing says which
    of them made an episode. Raises OSError.
    """
    functions = {name: whole_address(address) for name, address in config.items() if address}
    described: dict[str, Any] = {
        "workflow": whole_address(workflow),
        "run": str(folder),
        "folder": str(Path.cwd()),
        "config": functions,
    }
    if holds_records and read_trace(folder).get("workflow") != described["workflow"]:
        described["workflow"] = None
    with whole_file(folder / _NAME) as file:
        file.write(json.dumps(described, indent=2).encode())
    remember(orders_of_run(folder, described))


def read_trace(folder: Path) -> dict[str, Any]:
    """What trace.json says; empty where there is none, or it cannot be read."""
    return read_if_typed(folder / _NAME, dict[str, Any]) or {}
