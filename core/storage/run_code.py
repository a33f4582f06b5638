"""The code and the addresses that a run folder names, and whether they may be used.

Reading a folder never loads code that it names. Commands that run the application do. They first check that the user
trusts the folder: its author chose which code runs, and which address gets a key.

An "order" is a setting of the folder that decides about code or addresses.
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
"""Name of the order with the folder in which modules are searched first."""
_ORDERING_TABLES = ("engine_args.", "cluster.env.", "cluster.runtime_env.")
"""Tables whose values may name servers, variables, packages and classes."""
_FUNCTION_OR_SERVER = (*FUNCTIONS, "address", "engine", "teacher", "path")
"""Settings that name a function or a server if they have a colon; without one, a file or a built-in value."""

_trusted_here: set[str] = set()
"""Digests of orders that the user agreed to in this process, in case the user's state folder cannot be written."""


@dataclass(frozen=True)
class FolderOrders:
    """The code and addresses that a folder chooses, by the names of settings; "workflow" is the application."""

    folder: Path
    current: Mapping[str, str]
    """The orders, with the present paths of files."""
    as_written: Mapping[str, str]
    """The orders as the folder has them, with the paths of files when it was written."""

    @property
    def keys(self) -> list[str]:
        """The digests by which the user's trust in these orders is remembered. Either of them is enough.

        The first is of the orders with the present paths. The second is of the orders as they were written, and of the
        folder's inode: a user may move the folder together with the application, and a rename keeps the inode.
        """
        keys = [_digest(self.current)]
        with contextlib.suppress(OSError):
            stat = self.folder.stat()
            keys.append(_digest({**self.as_written, "inode": f"{stat.st_dev}:{stat.st_ino}"}))
        return keys


def orders_of_run(path: Path, described: Mapping[str, Any]) -> FolderOrders:
    """The orders of a run folder: its settings that choose code or addresses. `described` is the content of its
    run.json."""
    path = path.absolute()
    # The folder may have moved together with the application. Then the files have other paths than in run.json.
    written_config: Mapping[str, Any] = {}
    config_with_present_paths: Mapping[str, Any] = {}
    if isinstance(described.get("config"), Mapping):
        written_config = described["config"]
        config_with_present_paths = placed_config(described, path)
    workflow_with_present_path = known_workflow(described, path)
    current = _orders_in_config(workflow_with_present_path, config_with_present_paths, described)
    as_written = _orders_in_config(described.get("workflow"), written_config, described)
    return FolderOrders(path, current, as_written)


def _orders_in_config(workflow: str | None, config: Mapping[str, Any], described: Mapping[str, Any]) -> dict[str, str]:
    """The orders in a folder's configuration: the settings that choose code or addresses, by their dotted names.

    Secrets are withheld. `described` is the content of run.json. The folder where the run was started is an order too,
    if there are others, because modules are searched there.
    """
    orders = {"workflow": workflow} if workflow else {}
    tables = [("", config)]
    for number, policy_table in enumerate(config.get("policy") or ()):
        tables.append((f"policy.{number}.", policy_table))
    for prefix, table in tables:
        for name, value in leaves(table):
            if _is_order(name, value):
                orders[prefix + name] = WITHHELD if is_withheld(name) else str(value)
    if orders and (folder := described.get("folder")):
        orders[FOLDER] = str(folder)
    return orders


def _is_order(name: str, value: Any) -> bool:
    """Whether a setting chooses code or an address. `name` is its dotted name."""
    if name.startswith(_ORDERING_TABLES):
        return True
    if name == "cluster.address" and value == "auto":  # Ray takes the address from the environment
        return True
    last_part = name.rpartition(".")[2]
    return last_part in _FUNCTION_OR_SERVER and ":" in str(value)


def remember_orders(orders: FolderOrders) -> None:
    """Remember that this user gave these orders (settings that choose code or addresses) or agreed to them.

    The digests are stored in the user's state folder, because the author of a run folder chose its content.
    """
    if not orders.current:
        return
    # The process remembers them too: the state folder may be read-only.
    _trusted_here.update(orders.keys)
    with contextlib.suppress(OSError):
        folder = state_folder() / "trusted"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for key in orders.keys:
            (folder / key).touch()


def is_trusted(orders: FolderOrders) -> bool:
    """Whether the code and the addresses that a folder chooses (its orders) may be used without asking the user.

    They may if this user gave or agreed to all of them, or named the folder or a parent of it in COTUNE_TRUST_FOLDERS
    (a list of folders, like PATH).
    """
    if not orders.current:
        return True
    for key in orders.keys:
        if key in _trusted_here or (state_folder() / "trusted" / key).exists():
            return True
    folder = orders.folder.resolve()
    for trusted_folder in os.environ.get("COTUNE_TRUST_FOLDERS", "").split(os.pathsep):
        if trusted_folder and folder.is_relative_to(Path(trusted_folder).expanduser().resolve()):
            return True
    return False


def check_trusted(orders: FolderOrders, used: Collection[str]) -> bool:
    """Raise UntrustedFolderError if the command would follow orders (settings that choose code or addresses) of a
    folder that the user does not trust.

    `used` are the names of the orders that the command follows. Returns whether the folder is trusted; False if it is
    not, but has none of these orders.
    """
    if is_trusted(orders):
        return True
    untrusted = {name: value for name, value in orders.current.items() if name in used}
    if not untrusted:
        return False
    # The user must also see from which folder modules would be imported, because that decides which code runs.
    if FOLDER in orders.current:
        untrusted[FOLDER] = orders.current[FOLDER]
    raise UntrustedFolderError(orders.folder, untrusted, orders)


def open_run_code(
    path: str | Path,
    set_by_user: Collection[str] = (),
    *,
    only: Collection[str] | None = None,
    described: Mapping[str, Any] | None = None,
) -> bool:
    """Check that the code named by a run may be loaded, and let modules be imported from the folder where the run was
    started. Call this before you load anything that a run names.

    An order is a setting that chooses code or an address. `set_by_user` names the orders that the user sets instead of
    the folder, and `only` the orders that the command follows (default: all). `described` is the content of the
    folder's description, if that is not in run.json. Returns whether the folder is trusted. Raises
    UntrustedFolderError if it is not trusted and the command would follow one of its orders.
    """
    path = Path(path).absolute()
    if described is None:
        described = read_run_json(path)
    orders = orders_of_run(path, described)
    followed: list[str] = []
    for name in orders.current:
        if name in set_by_user or name == FOLDER:
            continue
        last_part = name.rpartition(".")[2]
        if only is None or name in only or last_part in only:
            followed.append(name)
    trusted = check_trusted(orders, followed)
    if trusted:
        import_from(described.get("folder"))
    return trusted


def import_from(folder: str | None) -> None:
    """Search modules in the folder in which a run was started, then in the current one, before installed packages.

    Call this only for a trusted folder: the author of run.json chooses `folder`, and so the code of every later import.
    """
    folders = [folder, str(Path.cwd())]
    sys.path[:0] = [path for path in folders if path and path not in sys.path]


def redactor_of(folder: Path | None) -> str:
    """The address of the redactor for records in a folder, ready to be loaded; "" without one.

    The folder is a run folder or the folder of one of its evaluations. Raises UntrustedFolderError.
    """
    if folder is None:
        return ""
    run = next((candidate for candidate in (folder, folder.parent) if is_run(candidate)), None)
    if run is None:
        return ""
    redactor = str(read_config(run).get("redact", ""))
    if redactor:
        open_run_code(run, only=("redact",))
    return redactor


def _digest(orders: Mapping[str, str]) -> str:
    return hashlib.blake2b(json.dumps(orders, sort_keys=True).encode(), digest_size=20).hexdigest()
