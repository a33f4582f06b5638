"""Overlapping calls across frameworks, threads, tasks and nested frameworks: none on a wrong one."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.stress import Check, stress
from cotune.context import role
from cotune.storage.sqlite_store import SqliteStore

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("calls", [1_000, pytest.param(10_000, marks=pytest.mark.long)])
def test_no_call_is_on_the_wrong_role_episode_turn_or_candidate(calls: int):
    command = [sys.executable, "benchmarks/stress.py", "--calls", str(calls)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.stdout, done.stderr[-20_000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["calls"] >= calls
    assert result["wrong"] == 0, result


def test_the_check_finds_calls_on_a_wrong_role(tmp_path: Path):
    store = SqliteStore.open(tmp_path / "records.db")
    with role("someone"):
        check = asyncio.run(stress(40, store))
    store.close()
    assert check.wrong["role"] == check.calls - sum(name.startswith("bare") for name in check.roles) * 6


def test_the_check_finds_answers_of_another_candidate_and_turns_out_of_order():
    check = Check(random.Random(0))
    check.turns["e"]["planner"] = [1, 0]
    check.compare("e", [], [("planner", "<<planner|c|0>>")])
    assert check.wrong == {"candidate": 1, "turn": 1}
