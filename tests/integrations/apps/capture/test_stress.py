"""Overlapping calls across frameworks, threads, tasks and nested frameworks: none on a wrong one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[4]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("calls", [150, pytest.param(10_000, marks=pytest.mark.long)])
def test_no_call_is_on_the_wrong_role_episode_turn_or_candidate(calls: int):
    command = [sys.executable, "benchmarks/stress.py", "--calls", str(calls)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.stdout, done.stderr[-20_000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["calls"] >= calls
    assert result["wrong"] == 0, done.stdout
