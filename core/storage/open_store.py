"""Open the store at an address. No other place decides which kind of store an address means."""

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
"""The port of PostgreSQL if an address names none."""


class StoreUnavailableError(RunError):
    """The server of a store does not answer now. It may answer later."""


def is_path(address: Path | str) -> bool:
    """Whether an address is a path and not the URL of a database."""
    return "://" not in str(address)


def without_password(address: Path | str) -> str:
    """An address that may be shown to people and written to logs and files."""
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
    """The path of a records file without symbolic links. A run folder stands for its records file."""
    path = Path(path)
    return (path / RECORDS if path.is_dir() else path).resolve()


def store_identity(address: Path | str) -> str:
    """A text that is the same for every address of one store, and different for another store.

    Symbolic links in paths are resolved, and a run folder stands for its records file. A database is identified by its
    servers, its name and its `options`, which may choose a schema. The user, the password and the way to connect are
    ignored. The address of another package's store is compared as it is, without its password.
    """
    if is_path(address):
        return str(records_file(address))
    if scheme_of(address) not in POSTGRESQL:
        return without_password(address)
    parts = urlsplit(without_password(address))
    parameters = dict(parse_qsl(parts.query))

    # 1. The servers, each with its port.
    user_and_password, _, servers = parts.netloc.rpartition("@")
    if not servers:
        servers = parameters.get("host", "")
    hosts: list[str] = []
    for server in servers.split(","):
        host = server
        has_port = re.search(r":\d+$", server) is not None
        if not has_port:
            host = f"{server}:{parameters.get('port', DEFAULT_PORT)}"
        is_socket_folder = host.startswith("/")  # its capital letters matter, unlike those in the name of a server
        hosts.append(host if is_socket_folder else host.lower())

    # 2. The database. If the address does not name one, PostgreSQL uses the name of the user.
    database = unquote(parts.path.lstrip("/"))
    if not database:
        user = unquote(user_and_password.partition(":")[0])
        database = parameters.get("dbname") or user

    # 3. Other parameters that decide which server and which tables are used.
    identifying = [f"{key}={parameters[key]}" for key in ("service", "hostaddr", "options") if key in parameters]
    return f"postgresql://{','.join(hosts)}/{database}?{'&'.join(identifying)}"


def folder_of(address: Path | str) -> Path | None:
    """The folder of the files that accompany records: the run folder, or the parent folder of the records file. None
    for a database."""
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
    """An empty store for a run folder without a records file."""
    return SqliteStore.empty(folder)
