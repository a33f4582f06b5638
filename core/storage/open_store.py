"""The one place that says which store an address leads to."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from cotune.entry_points import STORES, entry_points_by_scheme, load_entry_point, scheme_of
from cotune.errors import RunError
from cotune.storage.protocol import Store
from cotune.storage.run_layout import RECORDS
from cotune.storage.sqlite_store import SqliteStore

POSTGRESQL = ("postgresql", "postgres")
"""Schemes of PostgreSQL, which has many addresses for one database."""
DEFAULT_PORT = 5432
"""The port of PostgreSQL where an address names none."""


class StoreUnavailableError(RunError):
    """The server of a store does not answer now. It may do so later."""


def is_path(address: Path | str) -> bool:
    """Whether an address is a path, and not one of a database."""
    return "://" not in str(address)


def without_password(address: Path | str) -> str:
    """An address as people, logs and files may see it."""
    text = str(address)
    if is_path(text):
        return text
    text = re.sub(r"(?<=://)([^:/?#]*):.*@", r"\1:***@", text)
    return re.sub(r"(?<=[?&])([^=&]*)=[^&]*", _parameter_without_password, text)


def _parameter_without_password(parameter: re.Match[str]) -> str:
    # The names of parameters may be percent-encoded, such as %70assword.
    if unquote(parameter[1]).lower() in ("password", "sslpassword"):
        return f"{parameter[1]}=***"
    return parameter[0]


def records_file(path: Path | str) -> Path:
    """The file that records are in, without symbolic links. A run folder stands for its records file."""
    path = Path(path)
    return (path / RECORDS if path.is_dir() else path).resolve()


def store_identity(address: Path | str) -> str:
    """A text that is the same for every address of one store, and differs for another store.

    Paths are resolved with their symbolic links, and a run folder stands for its records file. A database is known by
    its servers, its name and its `options`, which may choose a schema. The user, the password and how to connect do not
    count. The address of another package's store is compared as it is, without its password.
    """
    if is_path(address):
        return str(records_file(address))
    if scheme_of(address) not in POSTGRESQL:
        return without_password(address)
    parts = urlsplit(without_password(address))
    asked = dict(parse_qsl(parts.query))
    user, _, servers = parts.netloc.rpartition("@")
    hosts = []
    for server in (servers or asked.get("host", "")).split(","):
        has_port = re.search(r":\d+$", server) is not None
        place = server if has_port else f"{server}:{asked.get('port', DEFAULT_PORT)}"
        # The folder of a socket keeps its capital letters, unlike the name of a server.
        hosts.append(place if place.startswith("/") else place.lower())
    # Without a name the server takes the user's as that of the database.
    name = unquote(parts.path.lstrip("/")) or asked.get("dbname") or unquote(user.partition(":")[0])
    further = [f"{key}={asked[key]}" for key in ("service", "hostaddr", "options") if key in asked]
    return f"postgresql://{','.join(hosts)}/{name}?{'&'.join(further)}"


def folder_of(address: Path | str) -> Path | None:
    """The folder of other files beside records: the run folder, or the one of the records file; None for a database."""
    if not is_path(address):
        return None
    path = Path(address).absolute()
    return path if path.is_dir() else path.parent


def open_store(address: Path | str, read_only: bool = False) -> Store:
    """Open the records at an address: a run folder, a records file, `postgresql://...`, or the scheme of a store that
    another package registers. A writer creates the file, or the tables.

    Raises RunError when no installed package opens the address, another process writes the file, or it cannot be
    opened; ConfigError when the store needs a package that is not installed.
    """
    if is_path(address):
        return SqliteStore.open(address, read_only)
    scheme = scheme_of(address)
    installed = entry_points_by_scheme(STORES)
    if scheme not in installed:
        schemes = ", ".join(f"{name}://" for name in sorted(installed)) or "none"
        raise RunError(
            f"No installed package opens {without_password(address)} (installed: {schemes}).",
            f"Name a run folder, its records file or a database, or install a package that registers {scheme!r} in "
            f"the entry points {STORES}.",
        )
    opened = load_entry_point(STORES, scheme)(address, read_only)
    if not isinstance(opened, Store):
        cause = f"{installed[scheme][0].value} returned {type(opened).__name__} for {scheme}://, not a Store."
        raise RunError(cause, "Return an instance of a subclass of cotune.storage.protocol.Store.")
    return opened


def no_records(folder: Path) -> Store:
    """The records of a run folder that has none."""
    return SqliteStore.empty(folder)
