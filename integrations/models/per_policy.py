"""A sampler for each policy, as one: of policies whose base models differ, or whose full weights fill an engine."""

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
    """The `Sampler` protocol over one sampler per policy name, which several may share, and perhaps one for the rest.

    It can be pickled where they can. `aclose` closes all of them.
    """

    def __init__(self, samplers: Mapping[str, Sampler], rest: Sampler | None = None) -> None:
        self._samplers = dict(samplers)
        self._rest = rest

    async def _call(self, method: str, *arguments: Any) -> Any:
        if method == "info":
            return await self._joint_info()
        policy = next((argument for argument in arguments if isinstance(argument, PolicyRef)), None)
        if policy is not None:
            return await getattr(self._of(policy), method)(*arguments)
        answers = await asyncio.gather(*(getattr(sampler, method)(*arguments) for sampler in self._all()))
        return [trace for traces in answers for trace in traces or ()]

    async def _joint_info(self) -> SamplerInfo:
        """All that is served; the longest context length, as each sampler cuts replies to its own; counters summed."""
        infos = await asyncio.gather(*(sampler.info() for sampler in self._all()))
        counters: Counter[str] = Counter()
        for info in infos:
            counters.update(info.counters)
        return SamplerInfo(
            name="; ".join(info.name for info in infos),
            max_model_len=max(info.max_model_len for info in infos),
            served={key: value for info in infos for key, value in info.served.items()},
            counters=counters,
        )

    async def aclose(self) -> None:
        """Close all samplers, also when one fails to. Safe to call twice."""
        ended = await asyncio.gather(*(sampler.aclose() for sampler in self._all()), return_exceptions=True)
        for error in ended:
            if isinstance(error, BaseException):
                raise error

    def _all(self) -> list[Sampler]:
        return [sampler for sampler in {id(s): s for s in (*self._samplers.values(), self._rest)}.values() if sampler]

    def _of(self, policy: PolicyRef) -> Sampler:
        sampler = self._samplers.get(policy.name, self._rest)
        if sampler is None:
            names = ", ".join(sorted(self._samplers))
            raise RequestRefused(f"{policy} has no engine; there are engines for {names}.", "Correct its name.")
        return sampler


async def open_engines(bases: Mapping[str, Sequence[str]], config: Callable[[str], EngineConfig]) -> Sampler:
    """An engine for each base model, the run's own first, as one sampler: `bases` names the policies of each, and the
    first answers for all others. Raises as `open_sampler`."""
    async with AsyncExitStack() as opened:  # closes those that run where a later one fails
        engines: dict[str, Sampler] = {}
        for model in bases:
            engines[model] = await open_sampler(config(model))
            opened.push_async_callback(engines[model].aclose)
        opened.pop_all()
    (_, rest), *others = engines.items()
    return PolicySampler({name: engine for base, engine in others for name in bases[base]}, rest) if others else rest
