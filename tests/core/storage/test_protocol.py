"""The protocol by itself: how much a new store has to do, and what becomes of one without SQL."""

from __future__ import annotations

import inspect

import pytest

from cotune.errors import RunError
from cotune.storage.open_store import STORES
from cotune.storage.protocol import Store
from tests.core.conftest import MemoryStore


def test_a_new_store_has_at_most_fifteen_methods_to_write() -> None:
    abstract = {name for name in Store.__abstractmethods__ if inspect.isfunction(getattr(Store, name))}
    assert len(abstract | {"figures"}) <= 15


@pytest.mark.parametrize("command", [["show"], ["view", "--port", "0"], ["show", "--steps"]])
def test_a_store_without_sql_is_not_shown(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from cotune.cli.main import main

    monkeypatch.setitem(STORES, "memory", lambda address, read_only: MemoryStore())  # type: ignore[arg-type]
    assert main([command[0], "memory://records", *command[1:]]) == 1
    assert "answers no queries" in capsys.readouterr().err


def test_what_sql_alone_can_do_names_the_stores_that_have_it() -> None:
    with pytest.raises(RunError, match="SQLite or PostgreSQL"):
        MemoryStore().figures()
