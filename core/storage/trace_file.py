"""trace.json in a folder that `cotune trace` wrote: the application whose records it holds, for commands that run it
again.

It has the fields of run.json that name code, so that the same rules decide whether they may be used (`run_code`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cotune.storage.run_code import orders_of_run, remember_orders
from cotune.storage.run_layout import whole_address
from cotune.storage.typed_json import read_if_typed
from cotune.storage.whole_file import whole_file

_NAME = "trace.json"


def write_trace(folder: Path, workflow: str, config: Mapping[str, str | None], *, holds_records: bool) -> None:
    """Write trace.json, with the address of the application that records into this folder.

    `config` has the addresses of the application's functions for the settings `redact` and `roles_by`, if any.
    `holds_records` is whether the folder already holds records. If these are of another application, or of an unknown
    one, the file names no application, because nobody could tell to which of them an episode belongs. Raises OSError.
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
    remember_orders(orders_of_run(folder, described))


def read_trace(folder: Path) -> dict[str, Any]:
    """The content of trace.json; empty if it is missing or cannot be read."""
    return read_if_typed(folder / _NAME, dict[str, Any]) or {}
