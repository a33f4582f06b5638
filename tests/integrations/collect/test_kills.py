"""Kills and full disks: what an application has recorded arrives, once, whatever ends in between."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.integrations.collect.processes import App, adopted, check, collecting
from tests.ports import free_port
from tests.postgres import server

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("applications", "collectors"), [(4, 2), pytest.param(100, 20, marks=[pytest.mark.long, pytest.mark.timeout(1800)])]
)
def test_kills_lose_nothing_and_store_nothing_twice(
    spool_folder: Path, records: Path, applications: int, collectors: int, record_property: Callable[..., None]
) -> None:
    rng, told = random.Random(7), []
    with collecting(str(records), free_port()) as collector:
        collector.start()
        for number in range(applications):
            app = App(collector.url, 60.0)
            app.wait_for(30)
            if number % (applications // collectors) == 0:
                time.sleep(rng.uniform(0.0, 0.3))
                collector.stop(kill=True)
                app.wait_for(60)  # into the spool alone
                collector.start()
            time.sleep(rng.uniform(0.0, 0.5))
            told += app.end(kill=True)
        told += adopted(collector.url, spool_folder)
        assert collector.stop() == 0
    record_property("records", check(str(records), told))
    assert len(told) >= 30 * applications


@pytest.mark.parametrize(
    ("kills", "applications"), [(1, 1), pytest.param(5, 5, marks=[pytest.mark.long, pytest.mark.timeout(900)])]
)
def test_a_killed_postgres_loses_nothing(spool_folder: Path, kills: int, applications: int) -> None:
    """Two collectors before one database, which is killed, as by a loss of power, and comes back."""
    rng, told = random.Random(8), []
    with server() as database:
        store = database.database()
        with collecting(store, free_port()) as one, collecting(store, free_port()) as two:
            one.start()
            two.start()
            for number in range(max(kills, applications)):
                app = App((one, two)[number % 2].url, 60.0)
                app.wait_for(60)
                time.sleep(rng.uniform(0.0, 0.5))
                database.stop("immediate")
                app.wait_for(len(app.told) + 60)
                database.start()
                told += app.end(kill=True)
            for collector in (one, two):
                told += adopted(collector.url, spool_folder)
                assert collector.stop() == 0
        check(store, told)


@pytest.mark.long  # `test_full_disk.py` fills the disk of each on its own
def test_a_full_disk_of_the_application_and_then_of_the_collector(spool_folder: Path, records: Path) -> None:
    with collecting(str(records), free_port()) as collector:
        app = App(collector.url, 6.0, pause=0.1, most=4000)  # the collector is not there yet, and the spool soon full
        app.wait_for(30)
        collector.start()
        told = app.end()
        assert not list(spool_folder.rglob("*.frames"))
        collector.stop()
        collector.start(most=records.stat().st_size + 100_000)
        full = App(collector.url, 60.0, pause=0.0)
        full.wait_for(900)  # more than the collector's disk takes
        while 'outcome="failed"' not in httpx.get(f"{collector.url}/metrics").text:
            time.sleep(0.1)
        told += full.end(kill=True)
        assert collector.stop() == 0
        collector.start()
        told += adopted(collector.url, spool_folder)
        assert collector.stop() == 0
    check(str(records), told)
