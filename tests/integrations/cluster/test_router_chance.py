"""The router under random faults, versions and requests."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from cotune.errors import EngineLost, RequestRefused, SamplerError, SampleTimeout
from cotune.integrations.cluster.router.router import RoutedSampler
from cotune.records.structs import PolicyRef
from tests.integrations.cluster.fake_engines import BASE_MARK, Site, weights_of
from tests.integrations.cluster.routed import BASE, LORA, mark, routed

MODES = ("dead", "dead", "hung", "stuck", "crash", "cancels", "forgets", "nan", "empty", "slow", "well")


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4, 40))])
def test_random_faults_at_random_moments(seed: int) -> None:
    """Requests, versions and faults at random: each answer is of the version that was asked for, each failure is
    named, and nothing is left behind."""
    chance = random.Random(seed)
    count = chance.randint(1, 4)
    site = Site(count, pace=chance.choice([0.5, 3.0]))
    live: dict[PolicyRef, int] = {BASE: BASE_MARK}
    ended: Counter[str] = Counter()

    async def ask(router: RoutedSampler) -> None:
        policy = chance.choice(list(live))
        expected = live[policy]
        patience = chance.choice([None, None, None, 30.0])
        task = asyncio.create_task(mark(router, policy, [chance.randrange(5)] * 40, timeout=patience))
        if chance.random() < 0.1:
            await asyncio.sleep(chance.uniform(0, 10))
            task.cancel()
        try:
            assert await task == expected
            ended["answered"] += 1
        except SampleTimeout:
            assert patience is not None
            ended["late"] += 1
        except EngineLost:
            assert all(replica.state == "lost" for replica in router._replicas)
            ended["lost"] += 1
        except RequestRefused as error:
            assert "ZeroDivisionError" in str(error)
            ended["refused"] += 1
        except SamplerError as error:
            assert "was not answered in 3 attempts" in str(error), error
            ended["failed"] += 1
        except asyncio.CancelledError:
            ended["cancelled"] += 1

    async def train(router: RoutedSampler) -> None:
        version = 0
        while True:
            await asyncio.sleep(chance.uniform(1, 20))
            version += 1
            policy = PolicyRef("planner", version)
            await router.publish(policy, weights_of(version + 100), LORA)
            live[policy] = version + 100
            if version > 2:
                old = PolicyRef("planner", version - 2)
                del live[old]
                await router.retire(old)

    async def break_things() -> None:
        while True:
            await asyncio.sleep(chance.expovariate(1 / 40))
            replica = chance.randrange(count)
            engine = site.now(replica)
            if chance.random() < 0.2:
                site.failing_starts[replica] = chance.randint(1, 3)
            mode = chance.choice(MODES)
            if mode == "forgets":
                engine.has.clear()
            elif mode == "slow":
                engine.pace *= 40
            elif engine.mode != "dead":
                engine.break_down(mode)

    async def scenario(router: RoutedSampler) -> None:
        background = [asyncio.create_task(train(router)), asyncio.create_task(break_things())]
        asked = []
        for _ in range(150):
            asked.append(asyncio.create_task(ask(router)))
            await asyncio.sleep(chance.expovariate(1.0))
        await asyncio.gather(*asked)
        for task in background:
            task.cancel()
        for outcome in await asyncio.gather(*background, return_exceptions=True):
            assert isinstance(outcome, asyncio.CancelledError | EngineLost), outcome
        await asyncio.sleep(300)
        assert len(router._queue) == 0
        assert all(engine.running == engine.load == 0 for engine in router._queue.healthy())
        for engines in site.engines:
            assert all(engine.closed for engine in engines[:-1])
        wanted = {key for key in map(str, live) if not key.endswith("@0")}
        for engine in router._queue.healthy():
            assert set(engine.sampler.has) >= wanted
        for kind in ("answered", "late", "cancelled", "refused"):
            assert router.counters[kind] == ended[kind]
        assert router.counters["failed"] == ended["failed"] + ended["lost"]

    restarts = {"max_restarts": 2} if seed % 4 == 0 else {"max_restarts": 20, "FORGIVE_AFTER": 60.0}
    routed(site, scenario, IN_FLIGHT=4, CONTROL_SECONDS=30.0, **restarts)
    assert all(engine.peak <= 4 for engine in site.all())
    assert sum(ended.values()) == 150
    assert ended["answered"] > 50 or ended["lost"]
    assert seed % 4 == 0 or not ended["lost"]
