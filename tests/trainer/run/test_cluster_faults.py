"""Runs on Ray that are stopped, or whose driver is killed, or the head node of their cluster: nothing is lost, trained
twice or left behind, and they go on.

`make test` kills one driver. The tests of the sampler in an actor end a process in order, and those of runs on Ray
lose a learner. The other parts, each at a random moment: benchmarks/chaos.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.ports import free_port
from tests.trainer import chaos
from tests.trainer.forked import Command
from tests.trainer.tiny_run import ENVIRONMENT, GONE, audit, hears, launch, log_of, new_run, on_cluster

pytestmark = pytest.mark.slow

ENGINE = "--set=engine=transformers"
HOPES_SHORTLY = {**ENVIRONMENT, "RAY_gcs_rpc_server_reconnect_timeout_s": "5"}
"""The environment of a Ray whose processes wait five seconds for a head node that is gone, not a minute."""


def in_shared_memory() -> set[str]:
    """Names of what Ray, torch and cotune keep there; engines of other tests have other things there meanwhile."""
    names = (path.name for path in Path("/dev/shm").iterdir())
    return {name for name in names if name.startswith(("cotune-ray", "plasma", "torch_"))}


def left_in_shared_memory(before: set[str], seconds: float = 60.0) -> set[str]:
    """What is there now and still after so many seconds: another test's Ray has a file there for a moment."""
    left, deadline = in_shared_memory() - before, time.monotonic() + seconds
    while (left := left & in_shared_memory()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def after(steps: int, run: Path, driver: Command) -> None:
    """Return when a run has made so many steps."""
    assert chaos.wait_for(chaos.Moment(steps, 0.0), run, driver.pid), log_of(run).read_text()


@pytest.mark.timeout(600)
def test_a_killed_run_leaves_nothing_and_goes_on_without_ray(tiny_base: Path, tmp_path: Path) -> None:
    before, run = in_shared_memory(), tmp_path / "run"
    victim = launch(new_run(tiny_base, run, 3, ENGINE, *on_cluster({"address": "local"})), run, HOPES_SHORTLY)
    after(1, run, victim)
    family = chaos.family(victim.pid)
    os.kill(victim.pid, signal.SIGKILL)
    assert victim.wait(240) == -signal.SIGKILL
    assert hears(run, f"Continue with: cotune train --resume {run}")
    assert len(family) > 5
    resumed = launch(["--resume", str(run), *on_cluster({"address": "none"})], run)
    assert resumed.wait(200) == 0, log_of(run).read_text()
    assert audit(run, 3) == (0, 0, 0)
    assert chaos.survivors(family, GONE) == []
    assert left_in_shared_memory(before) == set()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_killed_run_goes_on_and_a_stopped_one_leaves_nothing(tiny_base: Path, tmp_path: Path) -> None:
    """SIGKILL of a driver, and Ctrl-C, which reaches all of its group, when the run goes on: in the midst of a step."""
    before, families = in_shared_memory(), []
    run, way_on = tmp_path / "run", f"Continue with: cotune train --resume {tmp_path / 'run'}"
    victim = launch(new_run(tiny_base, run, 100, ENGINE, *on_cluster({"address": "local"})), run)
    after(2, run, victim)
    families.append(chaos.family(victim.pid))
    os.kill(victim.pid, signal.SIGKILL)
    assert victim.wait(240) == -signal.SIGKILL
    assert hears(run, way_on)
    done = chaos.steps_done(run)
    again = launch(["--resume", str(run)], run)
    after(done + 2, run, again)
    families.append(chaos.family(again.pid))
    os.killpg(again.pid, signal.SIGINT)
    assert again.wait(240) == 130
    assert log_of(run).read_text().count(way_on) == 2
    assert audit(run, chaos.steps_done(run)) == (0, 0, 0)
    assert all(len(family) > 5 for family in families)
    assert chaos.survivors(families[1], 60.0) == []
    assert chaos.survivors(families[0], GONE) == []
    assert left_in_shared_memory(before) == set()


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
            deadline = time.monotonic() + 240
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
    assert chaos.survivors(family[1:], 60.0) == []


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_head_node_that_is_lost_ends_the_run_with_the_cause_and_it_goes_on_without_ray(
    tiny_base: Path, tmp_path: Path
) -> None:
    run, port = tmp_path / "run", free_port()
    environment = dict(HOPES_SHORTLY)
    environment.pop("RAY_AUTH_MODE", None)
    with ray_head(port) as head:
        cluster = [ENGINE, *on_cluster({"address": f"127.0.0.1:{port}"})]
        driver = launch(new_run(tiny_base, run, 3, *cluster), run, environment)
        after(1, run, driver)
        kill(head)
        assert driver.wait(240) != 0
    assert hears(run, "or Ray has lost a node"), log_of(run).read_text()
    assert hears(run, f"Continue with: cotune train --resume {run}")
    resumed = launch(["--resume", str(run), *on_cluster({"address": "none"})], run, environment)
    assert resumed.wait(200) == 0, log_of(run).read_text()
    assert audit(run, 3) == (0, 0, 0)
