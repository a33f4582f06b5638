"""A sampler for each policy, as one: for engines that hold the full weights of one policy only."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence

from cotune.errors import RequestRefused
from cotune.policies import LoraSpec
from cotune.recording.records import PolicyRef
from cotune.sampling.protocol import Completion, Sampler, SamplerInfo, SamplingParams, Weights


class PolicySampler:
    """The `Sampler` protocol over one sampler per policy name, and perhaps one for the rest.

    It can be pickled where they can. `aclose` closes all of them.
    """

    def __init__(self, samplers: Mapping[str, Sampler], rest: Sampler | None = None) -> None:
        self._samplers = dict(samplers)
        self._rest = rest

    async def sample(
        self, prompt_token_ids: Sequence[int], n: int, params: SamplingParams, policy: PolicyRef
    ) -> list[Completion]:
        """Draw `n` candidates from the policy's own sampler. Raises what it raises."""
        return await self._of(policy).sample(prompt_token_ids, n, params, policy)

    async def publish(self, policy: PolicyRef, weights: Weights, lora: LoraSpec | None = None) -> str:
        """Serve `policy` on its own sampler; return the fingerprint of what arrived."""
        return await self._of(policy).publish(policy, weights, lora)

    async def retire(self, policy: PolicyRef) -> None:
        """Refuse new requests of a version at once; it is freed when its running requests have ended."""
        await self._of(policy).retire(policy)

    async def info(self) -> SamplerInfo:
        """All that is served; the shortest context length; counters summed."""
        infos = await asyncio.gather(*(sampler.info() for sampler in self._all()))
        counters: Counter[str] = Counter()
        for info in infos:
            counters.update(info.counters)
        return SamplerInfo(
            name="; ".join(info.name for info in infos),
            max_model_len=min(info.max_model_len for info in infos),
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
        return [*self._samplers.values(), *([self._rest] if self._rest is not None else [])]

    def _of(self, policy: PolicyRef) -> Sampler:
        sampler = self._samplers.get(policy.name, self._rest)
        if sampler is None:
            names = ", ".join(sorted(self._samplers))
            raise RequestRefused(f"{policy} has no engine; there are engines for {names}.", "Correct the name.")
        return sampler
