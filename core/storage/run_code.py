"""The code and the addresses that a run folder names, and whether they are obeyed.

Reading a folder loads nothing that it names. Commands that run the application do, and so they first ask whether this
user may mean it: whoever wrote the folder chose which code runs, and which address gets a key.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cotune.errors import UntrustedFolderError
from cotune.storage.run_layout import (
    FUNCTIONS,
    WITHHELD,
    is_run,
    is_withheld,
    known_workflow,
    leaves,
    placed_config,
    read_config,
    read_run_json,
)
from cotune.storage.state_folder import state_folder

FOLDER = "modules from"
"""Name of the order that says where modules are found first."""
_ALWAYS = ("engine_args.", "cluster.env.", "cluster.runtime_env.")
"""Tables whose values may name servers, variables, packages and classes."""
_WITH_COLON = (*FUNCTIONS, "address", "engine", "teacher", "path")
"""Settings that name a function or a server if they have a colon; else a file, or one of cotune's own values."""

_agreed: set[str] = set()
"""Orders that were agreed to in this process, where the user's folder cannot be written."""


@dataclass(frozen=True)
class FolderOrders:
    """What a folder decides of code and addresses, by the names of settings; "workflow" is the application."""

    folder: Path
    named: Mapping[str, str]
    """With files where they are now."""
    written: Mapping[str, str]
    """As the folder says it, with files where they were."""

    @property
    def keys(self) -> list[str]:
        """What is kept of orders that are trusted: a digest of them, and one for this very folder, which a user may
        move together with the application: a rename keeps its inode."""
        keys = [_digest(self.named)]
        with contextlib.suppress(OSError):
            found = self.folder.stat()
            keys.append(_digest({**self.written, "inode": f"{found.st_dev}:{found.st_ino}"}))
        return keys


def orders_of_run(path: Path, described: Mapping[str, Any]) -> FolderOrders:
    """What a run.json decides."""
    path = path.absolute()
    has_config = isinstance(described.get("config"), Mapping)
    named = _orders(known_workflow(described, path), placed_config(described, path) if has_config else {}, described)
    written = _orders(described.get("workflow"), described["config"] if has_config else {}, described)
    return FolderOrders(path, named, written)


def _orders(workflow: str | None, config: Mapping[str, Any], described: Mapping[str, Any]) -> dict[str, str]:
    orders = {"workflow": workflow} if workflow else {}
    tables = [("", config)]
    for number, table in enumerate(config.get("policy") or ()):
        tables.append((f"policy.{number}.", table))
    for prefix, table in tables:
        for name, value in leaves(table):
            in_table = name.startswith(_ALWAYS)
            if in_table or (name.rpartition(".")[2] in _WITH_COLON and ":" in str(value)):
                orders[prefix + name] = WITHHELD if is_withheld(name) else str(value)
            elif name == "cluster.address" and value == "auto":  # the cluster that the environment names
                orders[prefix + name] = value
    if orders and (folder := described.get("folder")):
        orders[FOLDER] = str(folder)
    return orders


def remember(orders: FolderOrders) -> None:
    """Keep that this user gave or agreed to these orders, outside of the folder that holds them."""
    if not orders.named:
        return
    _agreed.update(orders.keys)
    with contextlib.suppress(OSError):
        folder = state_folder() / "trusted"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for key in orders.keys:
            (folder / key).touch()


def is_trusted(orders: FolderOrders) -> bool:
    """Whether this user gave or agreed to all of these orders, or names a folder above in COTUNE_TRUST_FOLDERS (folders
    as in PATH)."""
    if not orders.named:
        return True
    if any(key in _agreed or (state_folder() / "trusted" / key).exists() for key in orders.keys):
        return True
    above = [Path(one).expanduser() for one in os.environ.get("COTUNE_TRUST_FOLDERS", "").split(os.pathsep) if one]
    return any(orders.folder.resolve().is_relative_to(one.resolve()) for one in above)


def check_trusted(orders: FolderOrders, taken: Collection[str]) -> bool:
    """Whether a folder is trusted. Raises UntrustedFolderError where it is not, and gives an order that is `taken`."""
    if is_trusted(orders):
        return True
    obeyed = {name: value for name, value in orders.named.items() if name in taken}
    if obeyed:
        if FOLDER in orders.named:
            obeyed[FOLDER] = orders.named[FOLDER]
        raise UntrustedFolderError(orders.folder, obeyed, orders)
    return False


def open_run_code(
    path: str | Path,
    named: Collection[str] = (),
    *,
    only: Collection[str] | None = None,
    described: Mapping[str, Any] | None = None,
) -> bool:
    """Before anything that a run names is loaded: check that it may be, and find modules where the run found them.

    `described` is what the folder says, if that is not in its run.json. `named` are orders that the user gives instead
    of the folder, `only` those that the command obeys (default: all). Returns whether the folder is trusted. Raises
    UntrustedFolderError.
    """
    path = Path(path).absolute()
    described = read_run_json(path) if described is None else described
    orders = orders_of_run(path, described)
    taken = [name for name in orders.named if name not in (*named, FOLDER)]
    if only is not None:
        taken = [name for name in taken if name in only or name.rpartition(".")[2] in only]
    trusted = check_trusted(orders, taken)
    if trusted:
        import_from(described.get("folder"))
    return trusted


def import_from(folder: str | None) -> None:
    """Find modules in the folder in which a run was started, then in the current one, before installed packages.

    Only for a folder that is trusted: whoever wrote run.json chooses it, and so the code that every later import loads.
    """
    folders = [folder, str(Path.cwd())]
    sys.path[:0] = [one for one in folders if one and one not in sys.path]


def redactor_of(folder: Path | None) -> str:
    """The redactor that a run names for records in its folder or in that of one of its evaluations, ready to be loaded;
    "" without one. Raises UntrustedFolderError."""
    run = next((one for one in (folder, folder.parent) if is_run(one)), None) if folder else None
    if run is None or not (redactor := str(read_config(run).get("redact", ""))):
        return ""
    open_run_code(run, only=("redact",))
    return redactor


def _digest(orders: Mapping[str, str]) -> str:
    return hashlib.blake2b(json.dumps(orders, sort_keys=True).encode(), digest_size=20).hexdigest()
