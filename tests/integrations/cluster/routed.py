"""A router over fake engines, on a clock that jumps, and short ways to ask it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from unittest.mock import patch

from cotune.integrations.cluster.router import limits
from cotune.integrations.cluster.router.router import RoutedSampler
from cotune.records.policies import LoraSpec
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import SamplingParams
from tests.integrations.cluster.fake_engines import Site, jump

BASE = PolicyRef("anyone")
LORA = LoraSpec(rank=4)
PROMPT = list(range(20, 60))
ROLE = PolicyRef("planner", 1)


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8, **changes})


def routed(site: Site, scenario: Callable[[RoutedSampler], Awaitable[Any]], **changes: Any) -> Any:
    """The scenario's result; afterwards every engine that was made is closed, and nothing is counted twice.

    `changes` in capitals are limits, others are arguments of the router.
    """
    changed = {name: changes.pop(name) for name in list(changes) if name.isupper()}

    async def alone() -> Any:
        options = {"vocabulary": 1000, "health_timeout": 2.0, "max_restarts": 5, **changes}
        router = await RoutedSampler.open(site.makes(), **options)
        try:
            result = await scenario(router)
        finally:
            await router.aclose()
        count = router.counters
        ends = ("answered", "refused", "failed", "late", "cancelled")
        assert count["requests"] == sum(count[end] for end in ends)
        return result

    with patch.multiple(limits, **{"HEALTH_EVERY": 5.0, "REQUEST_SECONDS": 60.0, **changed}):
        result = jump(alone())
    assert all(engine.closed for engine in site.all())
    return result


def fault(router: RoutedSampler, replica: int) -> str:
    """Why a replica's engine was taken out."""
    return router._replicas[replica].fault


async def mark(router: RoutedSampler, policy: PolicyRef = BASE, prompt: list[int] = PROMPT, **changes: Any) -> int:
    """The mark of the weights that answered."""
    answer = await router.sample(prompt, 2, params(**changes), policy)
    (first,) = {completion.token_ids[0] for completion in answer}
    return first


async def marks(router: RoutedSampler, count: int, policy: PolicyRef = BASE) -> list[int]:
    prompts = [[*range(i, i + 40)] for i in range(count)]
    return list(await asyncio.gather(*(mark(router, policy, prompt) for prompt in prompts)))
