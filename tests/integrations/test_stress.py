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
from cotune.storage.sqlite_store import SqliteStore

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(1200)
def test_ten_thousand_calls_and_none_on_the_wrong_role_episode_turn_or_candidate():
    halves = [start(seed) for seed in (0, 1)]
    results = [json.loads(last_line(half)) for half in halves]
    assert sum(result["calls"] for result in results) >= 10_000
    assert [result["wrong"] for result in results] == [0, 0], results


def start(seed: int) -> subprocess.Popen[str]:
    command = [sys.executable, "benchmarks/stress.py", "--calls", "5000", "--seed", str(seed)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def last_line(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate()
    assert out, err[-20_000:]
    return out.splitlines()[-1]


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
