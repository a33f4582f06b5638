"""A sampler in a Ray actor, seen from outside: errors, death, other processes, and what is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cotune.errors import ConfigError, RequestRefused, SamplerError, SampleTimeout
from cotune.integrations.cluster.runtime import open_ray
from cotune.integrations.cluster.sampler import RaySampler, start_sampler
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import Completion, SamplerInfo, SamplingParams

pytestmark = pytest.mark.slow

HOW = SamplingParams(max_tokens=4)
REF = PolicyRef("any")


class Slow:
    """A sampler without a model. `served` tells how its requests ended."""

    def __init__(self, variable: str) -> None:
        self._counts = {"started": 0, "cancelled": 0}
        self._variable = variable

    async def sample(self, prompt: Any, n: int, params: SamplingParams, policy: PolicyRef) -> list[Completion]:
        self._counts["started"] += 1
        if policy.name == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if policy.name == "breaks":
            raise ZeroDivisionError("nobody thought of this")
        if policy.name == "refused":
            raise RequestRefused("refused@0 is not served.", "Publish it.")
        try:
            await asyncio.sleep(0 if policy.name == "quick" else 60)
        except asyncio.CancelledError:
            self._counts["cancelled"] += 1
            raise
        return [Completion(tuple(prompt), (0.0,) * len(prompt), "stop")] * n

    async def info(self) -> SamplerInfo:
        return SamplerInfo(name=os.environ[self._variable], max_model_len=os.getpid(), counters=dict(self._counts))

    async def aclose(self) -> None:
        pass


async def make(variable: str = "PATH") -> Slow:
    if variable == "wrong":
        raise ConfigError("variable", variable, "must be another", "Choose one.")
    return Slow(variable)


@pytest.fixture(scope="module")
def slow(ray_runtime: str) -> Iterator[RaySampler]:
    sampler = start(variable="COLOUR", env={"COLOUR": "red"})
    yield sampler
    asyncio.run(sampler.aclose())


def start(env: dict[str, str] | None = None, **arguments: Any) -> RaySampler:
    return asyncio.run(start_sampler(f"{__name__}:make", arguments, num_cpus=0, env=env))


def test_the_actor_has_the_environment_that_was_asked_for(slow: RaySampler) -> None:
    assert asyncio.run(slow.info()).name == "red"


def test_errors_arrive_as_themselves(slow: RaySampler) -> None:
    with pytest.raises(RequestRefused) as refused:
        asyncio.run(slow.sample([1], 1, HOW, PolicyRef("refused")))
    assert (refused.value.cause, refused.value.remedy) == ("refused@0 is not served.", "Publish it.")
    with pytest.raises(SamplerError, match="nobody thought of this"):
        asyncio.run(slow.sample([1], 1, HOW, PolicyRef("breaks")))
    with pytest.raises(SampleTimeout, match=r"within 0\.2 s"):
        asyncio.run(slow.sample([1], 1, SamplingParams(timeout=0.2), REF))


def test_a_request_that_is_cancelled_here_is_cancelled_there(slow: RaySampler) -> None:
    async def scenario() -> None:
        before = (await slow.info()).counters
        tasks = [asyncio.create_task(slow.sample([1], 1, HOW, REF)) for _ in range(20)]
        while (await slow.info()).counters["started"] < before["started"] + 20:
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(d) for d in done} == {asyncio.CancelledError}
        while (await slow.info()).counters["cancelled"] < before["cancelled"] + 20:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_every_process_of_the_cluster_can_sample_from_it(slow: RaySampler) -> None:
    import ray

    @ray.remote(num_cpus=0)
    def elsewhere(sampler: RaySampler) -> tuple[int, Any]:
        return os.getpid(), asyncio.run(sampler.sample([3, 4], 2, HOW, PolicyRef("quick")))

    pid, answer = ray.get(elsewhere.remote(slow))
    assert pid != os.getpid()
    assert answer == [Completion((3, 4), (0.0, 0.0), "stop")] * 2


def test_a_dead_actor_fails_what_is_pending_and_everything_after(ray_runtime: str) -> None:
    sampler = start()

    async def scenario() -> None:
        pending = asyncio.create_task(sampler.sample([1], 1, HOW, REF))
        await asyncio.sleep(0.5)
        for request in (sampler.sample([1], 1, HOW, PolicyRef("dies")), pending, sampler.sample([1], 1, HOW, REF)):
            with pytest.raises(SamplerError, match="engine is gone"):
                await request
        await sampler.aclose()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_closing_ends_the_process(ray_runtime: str) -> None:
    sampler = start()
    pid = asyncio.run(sampler.info()).max_model_len
    asyncio.run(sampler.aclose())
    assert gone(pid)


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not Path(f"/proc/{pid}").exists()


def test_a_factory_that_fails_says_why(ray_runtime: str) -> None:
    with pytest.raises(ConfigError, match="variable = 'wrong'"):
        start(variable="wrong")


def test_a_factory_that_is_not_there_is_named(ray_runtime: str) -> None:
    with pytest.raises(ConfigError, match=r"factory = 'json:missing'.*a name in json"):
        asyncio.run(start_sampler("json:missing", {}, num_cpus=0))


def test_a_second_runtime_of_the_process_joins_the_first(ray_runtime: str) -> None:
    import ray

    with open_ray("local") as joined:
        assert joined == ray_runtime
    assert ray.is_initialized()
    with pytest.raises(ConfigError, match=r"cluster = '10\.9\.8\.7:1'"), open_ray("10.9.8.7:1"):
        pass


LEAVING = """
import asyncio, os, signal, sys
from cotune.integrations.cluster.runtime import open_ray
from cotune.integrations.cluster.sampler import start_sampler

with open_ray("local", num_cpus=2):
    sampler = asyncio.run(start_sampler("tests.integrations.cluster.test_sampler:make", {}, num_cpus=0))
    print(asyncio.run(sampler.info()).max_model_len, flush=True)
    ACTION
"""


@pytest.mark.parametrize(
    ("action", "code"),
    [
        ("os.kill(os.getpid(), signal.SIGTERM); import time; time.sleep(60)", 143),
        # `tests/trainer/run/test_cluster_faults.py` kills a run, and looks for what is left of it.
        pytest.param("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, marks=pytest.mark.long),
    ],
    ids=["sigterm", "sigkill"],
)
def test_a_local_ray_leaves_nothing_behind(action: str, code: int, tmp_path: Path) -> None:
    script = tmp_path / "leaving.py"
    script.write_text(LEAVING.replace("ACTION", action))
    folder = Path("/tmp") / f"ct{os.getpid()}"  # short: Ray puts sockets under it
    folder.mkdir()
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(Path.cwd())}
    before = set(Path("/dev/shm").iterdir())
    try:
        done = subprocess.run([sys.executable, script], env=environment, stdout=subprocess.PIPE, text=True)
        assert done.returncode == code
        assert gone(int(done.stdout))
        assert processes_with(str(folder)) == []
        if code != -signal.SIGKILL:
            assert list(folder.glob("cotune-ray-*")) == []
        assert [p for p in Path("/dev/shm").iterdir() if p not in before and p.name.startswith("cotune-ray")] == []
    finally:
        subprocess.run(["rm", "-rf", str(folder)])


def processes_with(text: str) -> list[str]:
    """Command lines that name `text`, after those that are ending have ended."""
    deadline = time.monotonic() + 60
    while True:
        lines = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            except OSError:
                continue
        found = [line for line in lines if text in line and str(os.getpid()) not in line.split()]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)
