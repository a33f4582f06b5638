"""The protocol by itself: how much a new store has to do, and what becomes of one without SQL."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cotune.entry_points import entry_points_by_scheme
from cotune.errors import RunError
from cotune.storage.open_store import open_store
from cotune.storage.protocol import Store
from tests.core.conftest import MemoryStore

Register = Callable[[str, str], None]


def open_memory(address: str, read_only: bool) -> MemoryStore:
    return MemoryStore()


def open_nothing(address: str, read_only: bool) -> None:
    return None


@pytest.fixture
def register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Register]:
    """Installs a package that registers a function of this module, or another object, for a scheme."""
    monkeypatch.syspath_prepend(tmp_path)
    # The modules of tests have no name that can be imported: pytest does not put their folder on sys.path.
    monkeypatch.setitem(sys.modules, "stores_of_users", sys.modules[__name__])

    def install(package: str, value: str) -> None:
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[cotune.stores]\nmemory = {value}\n")
        importlib.invalidate_caches()
        entry_points_by_scheme.cache_clear()

    yield install
    entry_points_by_scheme.cache_clear()


def test_a_new_store_has_at_most_fifteen_methods_to_write() -> None:
    abstract = {name for name in Store.__abstractmethods__ if inspect.isfunction(getattr(Store, name))}
    assert len(abstract | {"figures"}) <= 15


@pytest.mark.parametrize("command", [["show"], ["view", "--port", "0"], ["show", "--steps"]])
def test_a_store_without_sql_is_not_shown(
    command: list[str], register: Register, capsys: pytest.CaptureFixture[str]
) -> None:
    from cotune.cli.main import main

    register("one", "stores_of_users:open_memory")
    assert main([command[0], "memory://records", *command[1:]]) == 1
    assert "cannot answer the queries" in capsys.readouterr().err


def test_what_sql_alone_can_do_names_the_stores_that_have_it() -> None:
    with pytest.raises(RunError, match="SQLite or PostgreSQL"):
        MemoryStore().figures()


def test_a_package_registers_its_store(register: Register) -> None:
    with pytest.raises(
        RunError, match=r"No installed package opens memory://x \(installed: postgres://, postgresql://\)"
    ):
        open_store("memory://x")
    register("one", "stores_of_users:open_memory")
    assert isinstance(open_store("memory://x"), MemoryStore)


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        (
            "missing_module:opened",
            "one registers missing_module:opened for memory://, which fails to import: .*module",
        ),
        ("stores_of_users:open_nothing", "returned NoneType for memory://, not a Store"),
    ],
)
def test_a_registered_store_that_does_not_work_is_named(register: Register, value: str, cause: str) -> None:
    register("one", value)
    with pytest.raises(RunError, match=cause):
        open_store("memory://x")


def test_two_packages_may_not_register_one_scheme(register: Register) -> None:
    register("one", "stores_of_users:open_memory")
    register("two", "stores_of_users:open_memory")
    with pytest.raises(RunError, match=r"one and two register memory:// in cotune\.stores"):
        open_store("memory://x")


def test_the_metadata_of_a_package_is_read_only_for_an_error(
    register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    register("one", "stores_of_users:open_memory")
    dist = property(lambda point: pytest.fail("reads the package's metadata"))
    monkeypatch.setattr("importlib.metadata.EntryPoint.dist", dist)
    assert isinstance(open_store("memory://here"), MemoryStore)
