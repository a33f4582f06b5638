"""A run on Ray whose driver is killed, or the head node of its cluster: nothing is lost, trained twice or left behind,
and the run goes on.

The other parts, each at a random moment: benchmarks/chaos.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cotune.sqlite_store import SqliteStore
from cotune.trainer.run_folder import read_metrics
from tests.trainer import chaos
from tests.trainer.tiny_app import TASKS

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


@contextlib.contextmanager
def ray_head(port: int) -> Iterator[psutil.Process]:
    """A head node that somebody else has started; in the end all its processes are killed."""
    with tempfile.TemporaryDirectory(prefix="head", dir="/tmp", ignore_cleanup_errors=True) as folder:
        command = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", f"--port={port}"]
        command += [f"--temp-dir={folder}", "--num-cpus=32", "--include-dashboard=false"]
        environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token"}
        environment |= {"RAY_worker_niceness": "0", "RAY_prestart_worker_first_driver": "0"}
        said = Path(folder) / "said"
        with said.open("w") as log:
            started = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        head = psutil.Process(started.pid)
        try:
            deadline = time.monotonic() + 120
            while "Ray runtime started" not in said.read_text():
                assert started.poll() is None and time.monotonic() < deadline, said.read_text()
                time.sleep(0.2)
            yield head
        finally:
            kill(head)
            started.wait()


def kill(head: psutil.Process) -> None:
    """As if the machine were switched off."""
    family = chaos.family(head.pid) if head.is_running() and head.status() != psutil.STATUS_ZOMBIE else []
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    assert chaos.survivors(family[1:], 30.0) == []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.timeout(600)
def test_a_head_node_that_is_lost_ends_the_run_with_the_cause_and_another_takes_it_on(
    tiny_base: Path, tmp_path: Path
) -> None:
    run, port = tmp_path / "run", free_port()
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    cotune = [sys.executable, "-m", "cotune.cli", "train"]
    command = [*cotune, "tests.trainer.worker_app:solve", "--tasks", str(tmp_path / "tasks.jsonl")]
    command += ["--model", str(tiny_base), "--out", str(run), "--policies", "full", "--steps", "4", "--lr", "5e-3"]
    command += ["--tasks-per-step", "3", "--cluster", f"127.0.0.1:{port}", "--set=cluster.engine=transformers"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENAI_BASE_URL": "http://127.0.0.1:9/v1"}
    environment["RAY_gcs_rpc_server_reconnect_timeout_s"] = "5"  # Ray itself would hope for a minute
    environment.pop("RAY_AUTH_MODE", None)
    with ray_head(port) as head, (tmp_path / "log").open("w") as log:
        driver = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
        while sum(1 for _ in read_metrics(run)) < 2 and driver.poll() is None:
            time.sleep(0.02)
        kill(head)
        assert driver.wait(120) != 0
    time.sleep(0.5)  # the witness of the end speaks after it
    said = (tmp_path / "log").read_text()
    assert "or Ray has lost a node" in said, said
    assert f"Go on with: cotune train --resume {run}" in said
    with ray_head(port):
        again = subprocess.run([*cotune, "--resume", str(run)], env=environment, capture_output=True, text=True)
        assert again.returncode == 0, again.stderr
    lines = list(read_metrics(run))
    store = SqliteStore.open(run / "records.db")
    consumed = Counter(store.consumed().values())
    store.close()
    assert [line["step"] for line in lines] == list(range(4))
    assert consumed == {line["step"]: line["groups"] for line in lines}
