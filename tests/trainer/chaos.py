"""Faults for a running cluster run: find a victim among the run's processes, break it at a random moment.

Victims are found by the titles that Ray gives its workers, "ray::CLASS" or "ray::CLASS.METHOD", among the descendants
of the driver. This holds for a Ray that the driver has started itself: there the raylet is the driver's child and the
workers are the raylet's. The router's actor and the engines' are of one class; the router starts first, so it is the
oldest. vLLM's own processes, titled "VLLM::...", are children of their engine's actor.
"""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from cotune.storage.metrics_file import read_metrics

SAMPLER, LEARNER, WORKER = "SamplerActor", "Worker", "Host"
"""Classes of the actors: engines and their router, learner ranks, rollout workers."""


class Fault(NamedTuple):
    """What is done to whom: `victims` are looked for below the driver. No signal: they get a tenth of the time only."""

    name: str
    victims: Callable[[psutil.Process], list[psutil.Process]]
    signal: signal.Signals | None


class Injected(NamedTuple):
    """A fault that was injected. `stopped` processes must be ended by the run itself, or by `release`; slowed ones end
    with it."""

    fault: str
    pid: int
    title: str
    stopped: bool


class Moment(NamedTuple):
    """So many seconds after so many steps were seen to be done."""

    steps: int
    seconds: float


def actors(driver: psutil.Process, kind: str) -> list[psutil.Process]:
    """Workers of Ray that are actors of this class, oldest first."""
    found = [process for process in driver.children(recursive=True) if _class(_title(process)) == kind]
    return sorted(found, key=lambda process: process.create_time())


def router(driver: psutil.Process) -> list[psutil.Process]:
    return actors(driver, SAMPLER)[:1]


def engines(driver: psutil.Process) -> list[psutil.Process]:
    """The engines' actors, and the processes in which vLLM runs them."""
    hosts = actors(driver, SAMPLER)[1:]
    return hosts + [child for host in hosts for child in _children(host) if _title(child).startswith("VLLM::")]


def learners(driver: psutil.Process) -> list[psutil.Process]:
    return actors(driver, LEARNER)


def rollout_workers(driver: psutil.Process) -> list[psutil.Process]:
    return actors(driver, WORKER)


FAULTS = (
    Fault("engine killed", engines, signal.SIGKILL),
    Fault("engine stopped", engines, signal.SIGSTOP),
    Fault("engine slowed", engines, None),
    Fault("router killed", router, signal.SIGKILL),
    Fault("learner rank killed", learners, signal.SIGKILL),
    Fault("rollout worker killed", rollout_workers, signal.SIGKILL),
    Fault("driver killed", lambda driver: [driver], signal.SIGKILL),
)


def inject(
    driver_pid: int, chance: random.Random, faults: Sequence[Fault] = FAULTS, seconds: float = 30.0
) -> Injected | None:
    """Break a random victim of a random one of `faults`.

    None when the driver ends, or none of them finds a victim for so many seconds.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and _alive(driver_pid):
        fault = chance.choice(faults)
        with contextlib.suppress(psutil.NoSuchProcess):
            victims = fault.victims(psutil.Process(driver_pid))
            if victims:
                return _break(chance.choice(victims), fault)
        time.sleep(0.05)  # a victim may be between its end and its restart
    return None


def release(injected: Injected) -> None:
    """Let a stopped process that is still there go on."""
    if injected.stopped and psutil.pid_exists(injected.pid):
        psutil.Process(injected.pid).resume()


def random_moment(chance: random.Random, steps: int, step_seconds: float) -> Moment:
    """Some time in one of the steps, the first and the last included."""
    return Moment(chance.randrange(steps), chance.uniform(0.0, step_seconds))


def wait_for(moment: Moment, run: Path, driver_pid: int) -> bool:
    """Wait until the run's metrics reach the moment. False when the driver has ended before."""
    while steps_done(run) < moment.steps:
        if not _alive(driver_pid):
            return False
        time.sleep(0.02)
    time.sleep(moment.seconds)
    return _alive(driver_pid)


def steps_done(run: Path) -> int:
    return sum(1 for _ in read_metrics(run))


def family(driver_pid: int) -> list[psutil.Process]:
    """The driver and all that it and its children have started; look before the driver is killed."""
    driver = psutil.Process(driver_pid)
    return [driver, *driver.children(recursive=True)]


def survivors(processes: Sequence[psutil.Process], seconds: float) -> list[str]:
    """Titles of those that still run after so many seconds."""
    deadline = time.monotonic() + seconds
    while (alive := [process for process in processes if _runs(process)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [f"{process.pid} {_title(process)}" for process in alive]


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _break(victim: psutil.Process, fault: Fault) -> Injected:
    title = _title(victim)
    if fault.signal is None:
        threading.Thread(target=_slow, args=(victim,), daemon=True).start()
    else:
        victim.send_signal(fault.signal)
    return Injected(fault.name, victim.pid, title, fault.signal is signal.SIGSTOP)


def _slow(victim: psutil.Process) -> None:
    """Let a process run for a tenth of the time, until it ends."""
    with contextlib.suppress(psutil.NoSuchProcess):
        while victim.is_running() and victim.status() != psutil.STATUS_ZOMBIE:
            victim.suspend()
            time.sleep(0.09)
            victim.resume()
            time.sleep(0.01)


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _title(process: psutil.Process) -> str:
    """What the process calls itself; empty when it has just ended."""
    try:
        return " ".join(process.cmdline()).strip()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


def _class(title: str) -> str:
    return title.removeprefix("ray::").partition(".")[0] if title.startswith("ray::") else ""


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
