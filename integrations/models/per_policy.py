"""Combines one sampler per policy, for policies with different base models, or whose full weights fill an engine."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from cotune.errors import RequestRefused
from cotune.integrations.models.engine_sampler import CalledSampler
from cotune.integrations.models.engines import EngineConfig, open_sampler
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import Sampler, SamplerInfo


class PolicySampler(CalledSampler):
    """The `Sampler` protocol over one sampler per policy name, and a default for all other policies.

    Several policies may share a sampler. It can be pickled if its samplers can. `aclose` closes all of them.
    """

    takes_remote_weights = True

    def __init__(self, samplers: Mapping[str, Sampler], default: Sampler | None = None) -> None:
        self._samplers = dict(samplers)
        self._default = default

    async def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method at the sampler of the policy among its arguments; at all samplers if no argument is a
        policy.
        """
        if method == "info":
            return await self._joint_info()
        policy = next((argument for argument in arguments if isinstance(argument, PolicyRef)), None)
        if policy is not None:
            return await getattr(self._of(policy), method)(*arguments)
        results = await asyncio.gather(*(getattr(sampler, method)(*arguments) for sampler in self._all()))
        joined: list[Any] = []
        for result in results:
            joined += result or ()
        return joined

    async def _joint_info(self) -> SamplerInfo:
        """The info of all samplers together: all versions, the sum of the counters, and the longest context length.

        The longest one is right because each sampler cuts replies to its own length.
        """
        infos = await asyncio.gather(*(sampler.info() for sampler in self._all()))
        counters: Counter[str] = Counter()
        served: dict[str, str] = {}
        for info in infos:
            counters.update(info.counters)
            served.update(info.served)
        return SamplerInfo(
            name="; ".join(info.name for info in infos),
            max_model_len=max(info.max_model_len for info in infos),
            served=served,
            counters=counters,
        )

    async def aclose(self) -> None:
        """Close all samplers, even if one of them fails to close. Safe to call twice."""
        results = await asyncio.gather(*(sampler.aclose() for sampler in self._all()), return_exceptions=True)
        for error in results:
            if isinstance(error, BaseException):
                raise error

    def _all(self) -> list[Sampler]:
        """All samplers, without duplicates."""
        by_id: dict[int, Sampler] = {}
        for sampler in (*self._samplers.values(), self._default):
            if sampler is not None:
                by_id[id(sampler)] = sampler
        return list(by_id.values())

    def _of(self, policy: PolicyRef) -> Sampler:
        sampler = self._samplers.get(policy.name, self._default)
        if sampler is None:
            names = ", ".join(sorted(self._samplers))
            raise RequestRefused(f"{policy} has no engine; there are engines for {names}.", "Correct its name.")
        return sampler


async def open_engines(bases: Mapping[str, Sequence[str]], config: Callable[[str], EngineConfig]) -> Sampler:
    """Open an engine for each base model, and combine them to one sampler.

    `bases` maps base models to the policies on them; the run's own base is first, and its engine answers for all other
    policies. Raises the same errors as `open_sampler`.
    """
    async with AsyncExitStack() as opened:  # closes the engines if a later one fails to open
        engines: dict[str, Sampler] = {}
        for model in bases:
            engines[model] = await open_sampler(config(model))
            opened.push_async_callback(engines[model].aclose)
        opened.pop_all()
    (_, default), *others = engines.items()
    if not others:
        return default
    samplers: dict[str, Sampler] = {}
    for base, engine in others:
        samplers |= dict.fromkeys(bases[base], engine)
    return PolicySampler(samplers, default)
