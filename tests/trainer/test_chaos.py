"""Faults find their victims: by title and descent, on simple processes and on real actors."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from cotune.integrations.ray.process import _Host
from cotune.integrations.ray.runtime import RayRuntime
from cotune.integrations.ray.sampler import SamplerActor
from cotune.integrations.ray.worker_group import Worker
from tests.trainer import chaos
from tests.trainer.test_metrics_file import LINE

pytestmark = pytest.mark.slow

# Titles as Ray's workers and vLLM's processes have them; `cat` waits for ever on a pipe where nothing comes.
TREE = """
actor() { (exec -a "$1" cat) <&0 & sleep 0.03; }
export -f actor
(exec -a raylet bash -c '
    actor ray::SamplerActor
    actor ray::SamplerActor.sample
    (exec -a ray::SamplerActor.open bash -c "(exec -a VLLM::EngineCore cat) <&0 & wait") <&0 &
    actor ray::Worker.call
    actor ray::Worker.__init__
    actor ray::_Host
    actor ray::IDLE
    actor ray::SamplerActorOfAnother
    wait
') <&0 &
wait
"""


TITLES = {
    *("raylet", "ray::SamplerActor", "ray::SamplerActor.sample", "ray::SamplerActor.open", "VLLM::EngineCore"),
    *("ray::Worker.call", "ray::Worker.__init__", "ray::_Host", "ray::IDLE", "ray::SamplerActorOfAnother"),
}


def everybody(driver: psutil.Process) -> list[str]:
    return [chaos._title(process).partition(" ")[0] for process in driver.children(recursive=True)]


@pytest.fixture
def driver() -> Iterator[psutil.Process]:
    """A process with a raylet below it, and below that two engines, their router, two ranks and a rollout worker."""
    process = subprocess.Popen(["bash", "-c", TREE], stdin=subprocess.PIPE)
    found = psutil.Process(process.pid)
    until(lambda: set(everybody(found)) == TITLES)
    everything = chaos.family(process.pid)
    yield found
    for one in everything:
        if one.is_running():
            one.kill()
    process.communicate()


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def titles(processes: list[psutil.Process]) -> list[str]:
    return [process.cmdline()[0] for process in processes]


def only(name: str) -> list[chaos.Fault]:
    return [fault for fault in chaos.FAULTS if fault.name == name]


def test_each_kind_of_process_is_found_and_nothing_else(driver: psutil.Process) -> None:
    assert titles(chaos.router(driver)) == ["ray::SamplerActor"]
    assert titles(chaos.engines(driver)) == ["ray::SamplerActor.sample", "ray::SamplerActor.open", "VLLM::EngineCore"]
    assert titles(chaos.learners(driver)) == ["ray::Worker.call", "ray::Worker.__init__"]
    assert titles(chaos.rollout_workers(driver)) == ["ray::_Host"]
    assert len(chaos.family(driver.pid)) == 11


@pytest.mark.parametrize("fault", chaos.FAULTS, ids=lambda fault: fault.name)
def test_a_fault_breaks_one_victim_of_its_own_kind(driver: psutil.Process, fault: chaos.Fault) -> None:
    victims = [victim.pid for victim in fault.victims(driver)]
    before = chaos.family(driver.pid)
    injected = chaos.inject(driver.pid, random.Random(1), [fault])
    assert injected.fault == fault.name
    assert injected.pid in victims
    victim = next(process for process in before if process.pid == injected.pid)
    if fault.name == "engine stopped":
        until(lambda: victim.status() == psutil.STATUS_STOPPED)
        assert len(chaos.survivors(before, 0.1)) == len(before)
        chaos.release(injected)
        until(lambda: victim.status() == psutil.STATUS_SLEEPING)
    elif fault.name == "engine slowed":
        for state in (psutil.STATUS_STOPPED, psutil.STATUS_SLEEPING, psutil.STATUS_STOPPED):
            until(lambda state=state: victim.status() == state)
    else:
        until(lambda: not chaos._alive(injected.pid))
        assert not any(line.startswith(f"{injected.pid} ") for line in chaos.survivors(before, 0.1))
        chaos.release(injected)


def test_all_faults_and_all_victims_come_up_in_time(driver: psutil.Process) -> None:
    harmless = [fault._replace(signal=0) for fault in chaos.FAULTS]  # signal 0 only asks whether the process is there
    chance = random.Random(0)
    seen = Counter(chaos.inject(driver.pid, chance, harmless)[:3] for _ in range(200))
    assert {name for name, _, _ in seen} == {fault.name for fault in chaos.FAULTS}
    assert len({pid for name, pid, _ in seen if name == "engine killed"}) == 3
    assert len({pid for name, pid, _ in seen if name == "learner rank killed"}) == 2
    again = random.Random(0)
    assert Counter(chaos.inject(driver.pid, again, harmless)[:3] for _ in range(200)) == seen


def test_a_victim_that_is_being_restarted_is_waited_for() -> None:
    parent = subprocess.Popen(
        ["bash", "-c", "sleep 0.4; (exec -a ray::_Host cat) <&0 & wait"], stdin=subprocess.PIPE, text=True
    )
    try:
        injected = chaos.inject(parent.pid, random.Random(0), only("rollout worker killed"))
        assert injected.title == "ray::_Host"
        assert chaos.inject(parent.pid, random.Random(0), only("learner rank killed"), seconds=0.2) is None
    finally:
        parent.kill()
        parent.communicate()
    assert chaos.inject(parent.pid, random.Random(0), only("rollout worker killed")) is None


def test_a_moment_is_reached_with_the_runs_steps(tmp_path: Path, driver: psutil.Process) -> None:
    def write() -> None:
        for step in range(3):
            time.sleep(0.05)
            with (tmp_path / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({**LINE, "step": step}) + "\n")

    writer = threading.Thread(target=write)
    writer.start()
    assert chaos.wait_for(chaos.Moment(3, 0.01), tmp_path, driver.pid)
    assert chaos.steps_done(tmp_path) == 3
    writer.join()
    driver.kill()
    assert not chaos.wait_for(chaos.Moment(4, 0.0), tmp_path, driver.pid)
    chance = random.Random(0)
    moments = [chaos.random_moment(chance, 10, 2.0) for _ in range(300)]
    assert {moment.steps for moment in moments} == set(range(10))
    assert all(0 <= moment.seconds <= 2 for moment in moments)


def test_as_a_script(tmp_path: Path, driver: psutil.Process) -> None:
    (victim,) = chaos.rollout_workers(driver)
    command = [sys.executable, "-m", "tests.trainer.chaos", "--driver", str(driver.pid), "--run", str(tmp_path)]
    given = ["--steps", "1", "--step-seconds", "0.1", "--seed", "3", "--fault", "rollout worker killed"]
    done = subprocess.run([*command, *given], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    assert f"pid={victim.pid}, title='ray::_Host'" in done.stdout
    assert chaos.survivors([victim], 10.0) == []


def test_rays_actors_have_the_titles_that_victims_are_found_by(ray_runtime: RayRuntime) -> None:
    import ray

    pid = os.getpid
    made = {
        chaos.SAMPLER: ray.remote(SamplerActor).options(num_cpus=0).remote(),
        chaos.LEARNER: ray.remote(Worker).options(num_cpus=0).remote("builtins:slice", 0, 1),
        chaos.WORKER: ray.remote(_Host).options(num_cpus=0).remote("builtins:object"),
    }
    pids = {kind: ray.get(actor.__ray_call__.remote(lambda _: pid())) for kind, actor in made.items()}
    driver = psutil.Process()
    for kind, actor in made.items():
        assert pids[kind] in [process.pid for process in chaos.actors(driver, kind)]
        ray.kill(actor)
