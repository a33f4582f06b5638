"""A sampler in a child process: calls, faults and the end of all its processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import psutil
import pytest

from cotune.errors import ConfigError, RequestRefused, SamplerError
from cotune.integrations.models.child import serve
from cotune.integrations.models.child.process import ProcessHost
from cotune.integrations.models.child.sampler import HostedSampler
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import SamplingParams
from tests.integrations.models.samplers.slow_sampler import WAIT

ROOT = Path(__file__).parents[4]
FACTORY = "tests.integrations.models.samplers.slow_sampler:open"
SOON = SamplingParams(max_tokens=1)
ANYONE = PolicyRef("anyone")


class SlowProcess(ProcessHost):
    body = serve.__name__
    environment: Mapping[str, str] = {"PYTHONPATH": str(ROOT)}
    has_children = True


async def started(**arguments: object) -> HostedSampler:
    return await HostedSampler(SlowProcess).start(serve.SamplerSource(FACTORY, dict(arguments)))


def with_sampler(scenario: Callable[[HostedSampler, list[int]], Awaitable[None]]) -> list[int]:
    """Run a scenario with a sampler and its processes; return those that still run when it is closed."""

    async def whole() -> list[int]:
        sampler = await started()
        try:
            pids = [int(pid) for pid in (await sampler.info()).name.split()]
            await scenario(sampler, pids)
        finally:
            await sampler.aclose()
        return [pid for pid in pids if runs(pid)]

    return asyncio.run(asyncio.wait_for(whole(), 120))


def runs(pid: int) -> bool:
    """Whether a process runs; its entry stays until whoever has adopted it looks."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ended(pids: list[int], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(runs, pids))


def test_requests_are_answered_refused_and_cancelled_in_the_child() -> None:
    async def scenario(sampler: HostedSampler, pids: list[int]) -> None:
        assert os.getpid() not in pids
        with pytest.raises(RequestRefused, match=r"The prompt is empty\."):
            await sampler.sample([], 1, SOON, ANYONE)
        waiting = asyncio.create_task(sampler.sample([WAIT], 1, SOON, ANYONE))
        assert (await sampler.sample([1], 2, SOON, ANYONE))[1].token_ids == (0,)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        # The child hears of it in its own time, perhaps after the next request.
        async with asyncio.timeout(30):
            while (await sampler.sample([1], 1, SOON, ANYONE))[0].token_ids != (1,):
                await asyncio.sleep(0.01)

    assert with_sampler(scenario) == []


def test_a_child_that_is_killed_fails_its_requests_with_the_cause_and_leaves_no_process() -> None:
    async def scenario(sampler: HostedSampler, pids: list[int]) -> None:
        waiting = asyncio.create_task(sampler.sample([WAIT], 1, SOON, ANYONE))
        await sampler.info()
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(SamplerError, match=r"its process ended with code -9"):
            await waiting
        with pytest.raises(SamplerError, match=r"its process ended with code -9"):
            await sampler.info()
        assert ended(pids)

    assert with_sampler(scenario) == []


def test_ctrl_c_in_the_terminal_reaches_no_process_of_the_engine() -> None:
    async def scenario(sampler: HostedSampler, pids: list[int]) -> None:
        assert {os.getpgid(pid) for pid in pids} == {pids[0]}
        assert {os.getsid(pid) for pid in pids} == {pids[0]}
        for pid in pids:
            os.kill(pid, signal.SIGINT)
        await sampler.sample([1], 1, SOON, ANYONE)
        assert all(map(runs, pids))

    assert with_sampler(scenario) == []


def test_a_child_that_starts_too_slowly_is_ended_and_its_files_are_removed() -> None:
    ended_with: list[int | None] = []

    class Late(SlowProcess):
        start_seconds = 0.1

        def remove_leftovers(self) -> None:
            assert self._process is not None
            ended_with.append(self._process.returncode)

    with pytest.raises(SamplerError, match=r"did not start in 0\.1 s"):
        asyncio.run(HostedSampler(Late).start(serve.SamplerSource(FACTORY, {})))
    assert ended_with == [-signal.SIGKILL]


def test_an_error_while_it_opens_arrives_as_itself() -> None:
    with pytest.raises(ConfigError, match=r"model = 'm' has no weights"):
        asyncio.run(started(fault="has no weights"))


def test_an_opening_that_is_cancelled_leaves_no_process() -> None:
    async def scenario() -> list[int]:
        before = set(psutil.Process().children())  # such as those of a Ray that other tests have started
        opening = asyncio.create_task(started(seconds=600.0))
        while not (children := set(psutil.Process().children()) - before):
            await asyncio.sleep(0.01)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        return [child.pid for child in children]

    assert ended(asyncio.run(scenario()))


@pytest.mark.parametrize("seconds", [0.0, 600.0], ids=["while it serves", "while it starts"])
def test_a_child_ends_with_an_application_that_is_killed(seconds: float) -> None:
    script = f"""
    import asyncio, threading, time
    import psutil
    from tests.integrations.models.samplers.test_child import started

    async def main():
        opening = asyncio.create_task(started(seconds={seconds}))
        if {seconds}:
            while not psutil.Process().children():
                await asyncio.sleep(0.01)
            print(psutil.Process().children()[0].pid, flush=True)
        else:
            print((await (await opening).info()).name, flush=True)
        time.sleep(600)

    asyncio.run(main())
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as application:
        assert application.stdout is not None
        pids = [int(pid) for pid in application.stdout.readline().split()]
        application.kill()
    assert pids
    assert ended(pids)
