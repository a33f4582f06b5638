"""A router over fake engines, on a clock that jumps, and short ways to ask it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from cotune.integrations.ray.router.router import Router
from cotune.integrations.ray.router.settings import RouterSettings
from cotune.policies import LoraSpec
from cotune.recording.records import PolicyRef
from cotune.sampling.protocol import SamplingParams
from tests.integrations.ray.fake_engines import Site, jump

BASE = PolicyRef("anyone")
LORA = LoraSpec(rank=4)
PROMPT = list(range(20, 60))
ROLE = PolicyRef("planner", 1)


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8, **changes})


def settings(**changes: Any) -> RouterSettings:
    quick = {"health_every": 5.0, "health_timeout": 2.0, "request_timeout": 60.0, "close_timeout": 10.0}
    return RouterSettings(**{"vocabulary": 1000, **quick, **changes})


def routed(
    site: Site, scenario: Callable[[Router], Awaitable[Any]], events: list[str] | None = None, **changes: Any
) -> Any:
    """The scenario's result; afterwards every engine that was made is closed, and nothing is counted twice."""

    async def alone() -> Any:
        router = Router(site.makes(), settings(**changes), None if events is None else events.append)
        await router.open()
        try:
            result = await scenario(router)
        finally:
            await router.aclose()
        count = router.counters
        ends = ("answered", "refused", "failed", "late", "cancelled")
        assert count["requests"] == sum(count[end] for end in ends)
        return result

    result = jump(alone())
    assert all(engine.closed for engine in site.all())
    return result


async def mark(router: Router, policy: PolicyRef = BASE, prompt: list[int] = PROMPT, **changes: Any) -> int:
    """The mark of the weights that answered."""
    answer = await router.sample(prompt, 2, params(**changes), policy)
    (first,) = {completion.token_ids[0] for completion in answer}
    return first


async def marks(router: Router, count: int, policy: PolicyRef = BASE) -> list[int]:
    prompts = [[*range(i, i + 40)] for i in range(count)]
    return list(await asyncio.gather(*(mark(router, policy, prompt) for prompt in prompts)))
