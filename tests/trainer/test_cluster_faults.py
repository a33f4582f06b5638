"""Runs on Ray that are stopped, or whose driver is killed, or the head node of their cluster: nothing is lost, trained
twice or left behind, and they go on.

The other parts, each at a random moment: benchmarks/chaos.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.trainer import chaos
from tests.trainer.tiny_app import TASKS

ROOT = Path(__file__).parents[2]
TRAIN = [sys.executable, "-m", "cotune.cli", "train"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OPENAI_BASE_URL": "http://127.0.0.1:9/v1"}
GONE = 180.0
"""Seconds after which no process of a killed run may be left. Ray's own agents try for a minute to tell a driver that
is gone that their raylet is gone."""


def started(
    base: Path, run: Path, steps: int, *cluster: str, environment: dict[str, str] = ENVIRONMENT
) -> subprocess.Popen[bytes]:
    """A run in a process of its own; what it says goes to `said(run)`."""
    tasks = run.with_suffix(".jsonl")
    tasks.write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    command = [*TRAIN, "tests.trainer.worker_app:solve", "--tasks", str(tasks), "--model", str(base), "--out", str(run)]
    command += ["--policies", "full", "--steps", str(steps), "--tasks-per-step", "3", "--lr", "5e-3"]
    command += [*cluster, "--set=cluster.engine=transformers"]
    with run.with_suffix(".log").open("w") as log:
        return subprocess.Popen(
            command, cwd=run.parent, env=environment, stdout=log, stderr=log, start_new_session=True
        )


def said(run: Path) -> str:
    return run.with_suffix(".log").read_text()


def until(steps: int, run: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 300
    while chaos.steps_done(run) < steps:
        assert process.poll() is None and time.monotonic() < deadline, said(run)
        time.sleep(0.02)


def resumed(run: Path, environment: dict[str, str] = ENVIRONMENT) -> subprocess.Popen[bytes]:
    with run.with_suffix(".log").open("a") as log:
        return subprocess.Popen([*TRAIN, "--resume", str(run)], env=environment, stdout=log, stderr=log)


@pytest.mark.timeout(600)
def test_killed_and_stopped_runs_leave_nothing_and_go_on(tiny_base: Path, tmp_path: Path) -> None:
    """SIGKILL of a driver, SIGTERM when the run goes on, and Ctrl-C, all in the midst of a step."""
    before = {path.name for path in Path("/dev/shm").iterdir()}
    killed, stopped = tmp_path / "killed", tmp_path / "stopped"
    victim, other = (started(tiny_base, run, 100, "--cluster", "local") for run in (killed, stopped))
    families = []

    def end(number: signal.Signals, process: subprocess.Popen[bytes]) -> int:
        families.append(chaos.family(process.pid))
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        code = process.wait(120)
        time.sleep(0.5)  # the witness of a driver's end speaks after it
        return code

    until(2, killed, victim)
    assert end(signal.SIGKILL, victim) == -signal.SIGKILL
    until(2, stopped, other)
    assert end(signal.SIGINT, other) == 130
    assert f"Go on with: cotune train --resume {killed}" in said(killed)
    assert f"Go on with: cotune train --resume {stopped}" in said(stopped)
    done = chaos.steps_done(killed)
    again = resumed(killed)
    until(done + 2, killed, again)
    assert end(signal.SIGTERM, again) == 130
    assert len(chaos.groups_trained(killed)) >= done + 2
    for family in families:
        assert len(family) > 5
        assert chaos.survivors(family, GONE) == []
    assert {path.name for path in Path("/dev/shm").iterdir()} - before == set()


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
    environment = {**ENVIRONMENT, "RAY_gcs_rpc_server_reconnect_timeout_s": "5"}  # Ray itself would hope for a minute
    environment.pop("RAY_AUTH_MODE", None)
    with ray_head(port) as head:
        driver = started(tiny_base, run, 4, "--cluster", f"127.0.0.1:{port}", environment=environment)
        until(2, run, driver)
        kill(head)
        assert driver.wait(120) != 0
    time.sleep(0.5)  # the witness of the end speaks after it
    assert "or Ray has lost a node" in said(run), said(run)
    assert f"Go on with: cotune train --resume {run}" in said(run)
    with ray_head(port):
        assert resumed(run, environment).wait(200) == 0, said(run)
    assert len(chaos.groups_trained(run)) == 4
