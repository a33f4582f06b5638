"""A run on Ray whose driver is killed: nothing is lost, trained twice or left behind, and the run goes on.

The other parts, each at a random moment: benchmarks/chaos.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(600)
def test_a_killed_driver_takes_all_with_it_and_the_run_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "chaos.py"), "--runs", "1", "--steps", "4"]
    command += ["--fault", "driver killed", "--keep", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    *rows, last = done.stdout.splitlines()
    assert "driver killed" in rows[-1]
    found = json.loads(last)
    nothing = ("finished", "failed", "groups_lost", "trained_twice", "stale_trained", "leaked")
    assert found == {"runs": 1, "resumed": 1, **dict.fromkeys(nothing, 0)}, (tmp_path / "run0" / "log").read_text()
