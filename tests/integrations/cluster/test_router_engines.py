"""The router over real engines: processes and Ray actors that are killed and stopped in the middle of a burst."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cotune.integrations.cluster.router import limits
from cotune.integrations.cluster.router.replica import Make, Replica
from cotune.integrations.cluster.router.router import RoutedSampler
from cotune.integrations.cluster.sampler import RaySampler, start_sampler
from cotune.integrations.models.transformers.sampler import TransformersSampler
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import Completion, Sampler, SamplingParams, fingerprint
from tests.integrations.models.samplers.test_contract import LORA, Reference, parameters, reference, tuned  # noqa: F401
from tests.integrations.models.samplers.weight_sender import offered, senders

pytestmark = pytest.mark.slow

PLANNER, CODER, BASE = PolicyRef("planner", 1), PolicyRef("coder", 1), PolicyRef("anyone")
ADAPTER = {PLANNER: "planner", CODER: "coder", BASE: None}
PROMPTS = [[1, *range(20 + i, 60 + i)] for i in range(16)]
HOW = SamplingParams(max_tokens=48)
LONG = SamplingParams(max_tokens=160)
"""So long that an engine is broken before it has answered."""


async def open_quick(makes: list[Make]) -> RoutedSampler:
    """A router that looks at its engines often."""
    limits.HEALTH_EVERY, limits.BACKOFF = 0.5, 0.1
    return await RoutedSampler.open(makes, health_timeout=10.0, vocabulary=512, max_restarts=5)


@pytest.fixture(autouse=True)
def limits_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEALTH_EVERY", "BACKOFF"):
        monkeypatch.setattr(limits, name, getattr(limits, name))


Burst = list[tuple[PolicyRef, list[int], list[Completion]]]


async def burst(sampler: Sampler, count: int, how: SamplingParams = HOW) -> Burst:
    """So many requests at once, of all policies in turn."""
    policies = list(ADAPTER)
    asked = [(policies[i % len(policies)], PROMPTS[i % len(PROMPTS)]) for i in range(count)]
    answers = await asyncio.gather(*(sampler.sample(prompt, 4, how, policy) for policy, prompt in asked))
    return [(policy, prompt, answer) for (policy, prompt), answer in zip(asked, answers, strict=True)]


def largest_gap(models: Reference, answers: Burst) -> float:
    """Between the log-probabilities that came back and those of the version that was asked for, in nats."""
    return max(
        float(np.abs(models.logprobs(ADAPTER[policy], prompt, c.token_ids, 1.0) - np.array(c.logprobs)).max())
        for policy, prompt, answer in answers
        for c in answer
    )


async def until(condition: Callable[[], Awaitable[bool]], seconds: float = 120.0, every: float = 0.2) -> None:
    deadline = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        await asyncio.sleep(every)


async def publish(sampler: Sampler, models: Reference) -> None:
    for policy in (PLANNER, CODER):
        await sampler.publish(policy, models.weights[policy.name], LORA)


def replicas(sampler: RoutedSampler) -> list[Replica]:
    return sampler._replicas


@pytest.mark.long
def test_a_process_is_killed_and_another_stopped_in_the_middle_of_a_burst(reference: Reference) -> None:  # noqa: F811
    opened: list[TransformersSampler] = []

    async def make() -> TransformersSampler:
        opened.append(await TransformersSampler.open(reference.folder, host="process"))
        return opened[-1]

    def processes() -> list[int]:
        return [sampler._host._process.pid for sampler in opened]

    async def break_one(sampler: RoutedSampler, how: signal.Signals, victim: int) -> None:
        asked = asyncio.create_task(burst(sampler, 48, LONG))

        async def all_running() -> bool:
            return all(replica.engine.running for replica in replicas(sampler))

        async def all_healthy() -> bool:
            return all(replica.state == "healthy" for replica in replicas(sampler))

        await until(all_running, every=0.01)
        os.kill(victim, how)
        assert largest_gap(reference, await asked) < 1e-4
        await until(all_healthy)

    async def scenario() -> None:
        sampler = await open_quick([make, make])
        await publish(sampler, reference)
        await break_one(sampler, signal.SIGKILL, processes()[0])
        await break_one(sampler, signal.SIGSTOP, processes()[1])
        counters = (await sampler.info()).counters
        assert counters["restarts"] == counters["unhealthy"] == 2
        assert counters["retried"] == counters["died"] >= 2
        assert counters["failed"] == 0
        given = [replica.engine.idle_since for replica in replicas(sampler)]
        assert largest_gap(reference, await burst(sampler, 24)) < 1e-4
        assert all(r.engine.idle_since > before for r, before in zip(replicas(sampler), given, strict=True))
        await sampler.aclose()

    asyncio.run(scenario())
    assert len(opened) == 4
    assert [pid for pid in processes() if Path(f"/proc/{pid}").exists()] == []


async def open_router_over_ray(model: str) -> RoutedSampler:
    """Runs in the router's own actor, and starts an actor for each engine."""
    factory = "cotune.integrations.models.transformers.sampler:TransformersSampler.open"
    make = functools.partial(start_sampler, factory, {"model": model, "host": "thread"})
    return await open_quick([make, make])


def engine_actors(hosted: Any) -> list[Any]:
    """Handles of the engines' actors, asked of the router in its actor."""
    return [replica.engine.sampler._process._actor for replica in hosted._object._replicas]


@pytest.mark.long  # in `make test`: `test_cluster.py` of the runs breaks engines in actors, `test_router.py` others
@pytest.mark.timeout(900)
@pytest.mark.parametrize("breaks", [[signal.SIGKILL], [signal.SIGKILL, signal.SIGSTOP]], ids=len)
def test_ray_actors_are_broken_in_the_middle_of_a_burst(
    ray_runtime: str,
    reference: Reference,  # noqa: F811
    breaks: list[signal.Signals],
) -> None:
    import ray

    async def scenario() -> None:
        path = f"{__name__}:open_router_over_ray"
        sampler = await start_sampler(path, {"model": str(reference.folder)}, num_cpus=0)
        await publish(sampler, reference)
        engines = await asyncio.to_thread(ray.get, sampler._process._actor.__ray_call__.remote(engine_actors))
        pids = [await engine.__ray_call__.remote(lambda hosted: os.getpid()) for engine in engines]
        for restarts, (how, victim) in enumerate(zip(breaks, pids, strict=False), start=1):
            asked = asyncio.create_task(burst(sampler, 24, LONG))
            await until(functools.partial(all_running, sampler), every=0.01)
            os.kill(victim, how)
            assert largest_gap(reference, await asked) < 1e-4

            async def back(restarts: int = restarts) -> bool:
                again = (await sampler.info()).counters["restarts"] >= restarts
                return again and await states(sampler) == ["healthy", "healthy"]

            await until(back)
            counters = (await sampler.info()).counters
            assert (counters["restarts"], counters["unhealthy"]) == (restarts, restarts)
        assert counters["retried"] == counters["died"] >= len(breaks)
        assert counters["failed"] == 0
        assert largest_gap(reference, await burst(sampler, 12)) < 1e-4
        await cancelled_everywhere(sampler)
        await sampler.aclose()

    asyncio.run(scenario())


def test_a_restarted_engine_has_both_live_full_versions_of_a_learner_that_is_lost(
    ray_runtime: str,
    reference: Reference,  # noqa: F811
) -> None:
    factory = "cotune.integrations.models.transformers.sampler:TransformersSampler.open"
    make = functools.partial(start_sampler, factory, {"model": str(reference.folder), "host": "thread"})
    versions = [parameters(tuned(reference, seed)) for seed in (1, 2)]
    refs = [PolicyRef("ahead", number) for number in (1, 2)]

    async def scenario() -> None:
        sampler = await open_quick([make])
        with senders() as group:
            for ref, weights in zip(refs, versions, strict=True):
                await sampler.publish(ref, await asyncio.to_thread(offered, group, weights))
        os.kill(replicas(sampler)[0].engine.sampler._process.pid, signal.SIGKILL)

        async def restarted() -> bool:
            return sampler.counters["restarts"] == 1 and replicas(sampler)[0].state == "healthy"

        await until(restarted)
        served = (await replicas(sampler)[0].engine.info()).served
        assert served == {str(ref): fingerprint(weights) for ref, weights in zip(refs, versions, strict=True)}
        await sampler.aclose()

    asyncio.run(scenario())


async def cancelled_everywhere(sampler: RaySampler) -> None:
    """What is cancelled here ends in the router's process and in the engines'."""
    endless = SamplingParams(max_tokens=400)
    engines = await sampler._process._actor.__ray_call__.remote(engine_actors)

    async def working() -> int:
        return sum(
            [await engine.__ray_call__.remote(lambda hosted: len(hosted._object._pending)) for engine in engines]
        )

    async def begun() -> bool:
        assert not any(task.done() for task in doomed), "one ended before it was cancelled"
        return await working() >= 8  # a look at an engine's health is one more

    async def ended() -> bool:
        return await working() == 0 and (await sampler.info()).counters["cancelled"] == 8

    doomed = [asyncio.create_task(sampler.sample(prompt, 64, endless, BASE)) for prompt in PROMPTS[:8]]
    await until(begun, every=0.01)
    for task in doomed:
        task.cancel()
    await until(ended)


async def all_running(sampler: RaySampler) -> bool:
    def read(hosted: Any) -> bool:
        return all(replica.engine.running for replica in hosted._object._replicas)

    return await sampler._process._actor.__ray_call__.remote(read)


async def states(sampler: RaySampler) -> list[str]:
    def read(hosted: Any) -> list[str]:
        return [replica.state for replica in hosted._object._replicas]

    return await sampler._process._actor.__ray_call__.remote(read)
