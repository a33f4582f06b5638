"""Which addresses lead to one store."""

from __future__ import annotations

from pathlib import Path

import pytest

from cotune.storage.open_store import store_identity


@pytest.mark.parametrize(
    "other",
    [
        "postgres://db/records",
        "postgresql://DB:5432/records",
        "postgresql://anna:old@db/records",
        "postgresql://ben:p%40ss@db:5432/records?sslmode=require&password=new",
        "postgresql://ben:p/a?s#s@db/records",
        "postgresql:///records?host=db",
        "postgresql://db/?dbname=records",
        "postgresql://records@db",
    ],
)
def test_one_database_by_other_addresses(other: str) -> None:
    assert store_identity(other) == store_identity("postgresql://db/records")


@pytest.mark.parametrize(
    "other",
    [
        "postgresql://db2/records",
        "postgresql://db:5433/records",
        "postgresql://db/records?port=5433",
        "postgresql://db/Records",
        "postgresql://db,db2/records",
        "postgresql://db/records?options=-csearch_path%3Dshop",
        "postgresql:///records",
    ],
)
def test_another_database(other: str) -> None:
    assert store_identity(other) != store_identity("postgresql://db/records")


def test_an_address_of_ipv6_with_and_without_its_port() -> None:
    assert store_identity("postgresql://[::1]/records") == store_identity("postgresql://[::1]:5432/records")
    assert store_identity("postgresql://[::1]/records") != store_identity("postgresql://[::2]/records")


def test_sockets_in_folders_that_differ_in_capital_letters() -> None:
    assert store_identity("postgresql:///r?host=/run/A") != store_identity("postgresql:///r?host=/run/a")
    assert store_identity("postgresql:///r?host=/run/a") == store_identity("postgresql://anna@/r?host=/run/a&port=5432")


def test_a_run_folder_stands_for_its_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r1").mkdir()
    assert store_identity("r1") == str(tmp_path / "r1" / "records.db") == store_identity(tmp_path / "r1" / "records.db")
