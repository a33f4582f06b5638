"""One sampler for each policy: every request, version and end goes to its own."""

from __future__ import annotations

import pickle

import pytest

from cotune.errors import RequestRefused
from cotune.integrations.models.per_policy import PolicySampler
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import SamplingParams
from tests.integrations.cluster.fake_engines import BASE_MARK, FakeEngine, Site, jump, weights_of

HOW = SamplingParams(max_tokens=8)


def engines(count: int) -> list[FakeEngine]:
    site = Site(count)
    site.one_version = True
    return [FakeEngine(site, f"engine-{i}") for i in range(count)]


async def mark(sampler: PolicySampler, policy: PolicyRef) -> int:
    """Which weights answered."""
    return (await sampler.sample([1, 2], 1, HOW, policy))[0].token_ids[0]


def test_policies_never_meet_each_others_weights() -> None:
    async def scenario() -> None:
        one, two, rest = engines(3)
        sampler = PolicySampler({"one": one, "two": two}, rest)
        for version in (1, 2):
            await sampler.publish(PolicyRef("one", version), weights_of(10 + version))
        await sampler.publish(PolicyRef("two", 1), weights_of(21))
        policies = [PolicyRef("one", 2), PolicyRef("two", 1), PolicyRef("frozen")]
        assert [await mark(sampler, policy) for policy in policies] == [12, 21, BASE_MARK]
        assert set((await sampler.info()).served) == {"one@2", "two@1"}
        await sampler.retire(PolicyRef("two", 1))
        assert set((await sampler.info()).served) == {"one@2"}
        await sampler.aclose()
        assert one.closed and two.closed and rest.closed

    jump(scenario())


def test_a_policy_without_an_engine_is_refused_by_name() -> None:
    (one,) = engines(1)
    with pytest.raises(RequestRefused, match="three@1 has no engine; there are engines for one"):
        jump(PolicySampler({"one": one}).sample([1], 1, HOW, PolicyRef("three", 1)))


def test_all_are_closed_when_one_fails_to() -> None:
    async def scenario() -> None:
        one, two = engines(2)

        async def fails() -> None:
            raise OSError("no")

        one.aclose = fails  # type: ignore[method-assign]
        with pytest.raises(OSError, match="no"):
            await PolicySampler({"one": one, "two": two}).aclose()
        assert two.closed

    jump(scenario())


def test_it_travels_with_what_it_stands_on() -> None:
    assert pickle.loads(pickle.dumps(PolicySampler({}, None)))._default is None
