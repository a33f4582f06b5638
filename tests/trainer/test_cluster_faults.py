"""Runs on Ray in which a part is killed or stopped: they finish, or stop with the cause and go on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", ["driver killed", "engine stopped", "router killed"])
def test_nothing_is_lost_trained_twice_or_left_behind(tmp_path: Path, fault: str) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "chaos.py"), "--runs", "1", "--steps", "4", "--fault", fault]
    done = subprocess.run([*command, "--keep", str(tmp_path)], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    *rows, last = done.stdout.splitlines()
    log = (tmp_path / "run0" / "log").read_text()
    found = json.loads(last)
    assert fault in rows[-1], done.stdout
    assert found["finished"] + found["resumed"] == 1, log
    assert {found[name] for name in ("failed", "groups_lost", "trained_twice", "stale_trained", "leaked")} == {0}, log
    if fault == "router killed":
        assert "Go on with: cotune train --resume" in log and "engine is gone" in log
