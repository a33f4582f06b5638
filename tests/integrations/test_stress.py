"""Ten thousand overlapping calls across frameworks, threads, tasks and nested frameworks: none on a wrong one."""

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
from cotune.sqlite_store import SqliteStore

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(1200)
def test_ten_thousand_calls_and_none_on_the_wrong_role_episode_turn_or_candidate():
    command = [sys.executable, "benchmarks/stress.py", "--calls", "10000"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert run.stdout, run.stderr[-20_000:]
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["calls"] >= 10_000
    assert result["wrong"] == 0, run.stdout


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
