"""The ledger of judges, which all processes of a run open."""

from __future__ import annotations

import multiprocessing
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from cotune.storage.judge_ledger import Ledger

MANY = 6


def spend(together: Barrier, parent: str, folders: int) -> None:
    for number in range(folders):
        together.wait(60)
        Ledger(Path(parent) / str(number)).reserve("judge", 1.0, max_calls=3, max_cost=None)


@pytest.mark.parametrize("folders", [20, pytest.param(100, marks=pytest.mark.long)])
def test_a_new_ledger_may_be_opened_by_many_processes_at_once(tmp_path: Path, folders: int) -> None:
    for number in range(folders):
        (tmp_path / str(number)).mkdir()
    spawn = multiprocessing.get_context("spawn")
    together = spawn.Barrier(MANY)
    processes = [spawn.Process(target=spend, args=(together, str(tmp_path), folders)) for _ in range(MANY)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * MANY
    assert {Ledger(tmp_path / str(number)).totals()["requests"] for number in range(folders)} == {3}
