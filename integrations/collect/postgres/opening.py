"""Opens PostgreSQL for core, which finds this function by its entry point."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cotune.errors import ConfigError, install_extra
from cotune.storage.open_store import without_password

if TYPE_CHECKING:
    from cotune.integrations.collect.postgres.store import PostgresStore


def open_postgres(address: str | Path, read_only: bool) -> PostgresStore:
    """The records in a database. Raises ConfigError without psycopg, RunError if the database cannot be opened."""
    try:
        from cotune.integrations.collect.postgres.store import PostgresStore
    except ModuleNotFoundError as error:
        fault = f"needs psycopg ({error})"
        raise ConfigError("records", without_password(address), fault, install_extra("postgres")) from error
    return PostgresStore.open(str(address), read_only)
