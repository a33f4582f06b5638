"""Versions under the router: the same on all engines, also on those that start later, and never another."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from cotune.errors import LearnerLost, RequestRefused, SamplerError, SyncError
from cotune.integrations.cluster.router.router import RoutedSampler
from cotune.records.policies import LoraSpec
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import RemoteWeights, SamplerInfo, Weights, fingerprint
from tests.integrations.cluster.fake_engines import BASE_MARK, FakeEngine, Site, weights_of
from tests.integrations.cluster.routed import ROLE, fault, mark, marks, routed


def test_a_version_is_published_to_all_and_its_answers_are_its_own() -> None:
    site = Site(2)

    async def scenario(router: RoutedSampler) -> None:
        assert await router.publish(ROLE, weights_of(11)) == fingerprint(weights_of(11))
        assert [engine.has for engine in site.all()] == [{"planner@1": (fingerprint(weights_of(11)), 11)}] * 2
        assert set(await marks(router, 4, ROLE)) == {11}
        assert await mark(router) == BASE_MARK
        assert dict((await router.info()).served) == {"planner@1": fingerprint(weights_of(11))}
        assert await router.publish(ROLE, weights_of(11)) == fingerprint(weights_of(11))
        with pytest.raises(RequestRefused, match="published before with other weights"):
            await router.publish(ROLE, weights_of(12))

    routed(site, scenario)


def test_a_retired_version_is_refused_at_once_and_ends_with_its_last_request() -> None:
    site = Site(2, pace=10.0)

    async def scenario(router: RoutedSampler) -> None:
        await router.publish(ROLE, weights_of(11))
        asked = asyncio.gather(*(mark(router, ROLE) for _ in range(6)))
        await asyncio.sleep(1)
        await router.retire(ROLE)
        assert (await router.info()).served == {}
        with pytest.raises(RequestRefused, match="planner@1 is not served"):
            await mark(router, ROLE)
        with pytest.raises(RequestRefused, match="cannot be retired"):
            await router.retire(ROLE)
        assert all(engine.has for engine in site.all())
        assert set(await asked) == {11}
        await asyncio.sleep(1)
        assert [engine.has for engine in site.all()] == [{}, {}]

    routed(site, scenario, IN_FLIGHT=1)  # four of the six have not even begun when it is retired


def test_an_engine_where_something_else_arrives_is_named_and_the_version_is_served_by_none() -> None:
    site = Site(3)

    async def scenario(router: RoutedSampler) -> None:
        site.now(1).break_down("alters")
        with pytest.raises(SyncError, match=r"planner@1 .* engine-1: Policy planner@1 arrived with fingerprint ffff"):
            await router.publish(ROLE, weights_of(11))
        assert [engine.has for engine in site.all()] == [{}, {}, {}]
        with pytest.raises(RequestRefused, match="planner@1 is not served"):
            await mark(router, ROLE)
        site.now(1).break_down("well")
        assert await router.publish(ROLE, weights_of(12)) == fingerprint(weights_of(12))
        assert set(await marks(router, 6, ROLE)) == {12}

    routed(site, scenario)


def test_weights_that_every_engine_refuses_are_refused() -> None:
    async def scenario(router: RoutedSampler) -> None:
        with pytest.raises(RequestRefused, match="not finite"):
            await router.publish(ROLE, {"w": np.array([np.nan], np.float32)})

    routed(Site(2), scenario)


def test_weights_may_change_after_they_were_published() -> None:
    site, weights = Site(1), weights_of(11)

    async def scenario(router: RoutedSampler) -> None:
        await router.publish(ROLE, weights)
        weights["w"][0] = 99
        site.now(0).break_down("dead")
        assert await mark(router, ROLE) == 11

    routed(site, scenario)


def test_a_restarted_engine_has_all_live_versions_before_it_takes_requests(caplog: pytest.LogCaptureFixture) -> None:
    site = Site(2)
    kept, gone = PolicyRef("coder", 3), PolicyRef("coder", 2)

    async def scenario(router: RoutedSampler) -> None:
        await router.publish(gone, weights_of(2))
        await router.publish(kept, weights_of(3))
        await router.publish(ROLE, weights_of(11))
        await router.retire(gone)
        site.now(0).break_down("dead")
        await asyncio.sleep(30)
        assert len(site.engines[0]) == 2
        assert set(site.now(0).has) == {"coder@3", "planner@1"}
        assert set(await marks(router, 8, kept)) == {3}
        assert site.now(0).served
        assert (router.counters["unhealthy"], router.counters["restarts"]) == (1, 1)
        assert (router._replicas[0].state, fault(router, 0)) == ("healthy", "The engine is gone")

    routed(site, scenario)
    assert caplog.messages == [
        "Engine engine-0 is taken out: The engine is gone.",
        "Engine engine-0 is restarted in 1 s (1 of 5).",
        "Engine engine-0 is back, with 2 published versions.",
    ]


class InLearner(RemoteWeights):
    """Weights that each engine fetches when it loads them."""

    def __init__(self, mark: int) -> None:
        super().__init__(fingerprint(weights_of(mark)), float(mark), {"w": (1,)})
        self._mark = mark
        self.read = 0

    def __getitem__(self, name: str) -> np.ndarray:
        self.read += 1
        return weights_of(self._mark)[name]


def test_engines_alone_read_weights_of_the_learner_and_a_restarted_one_reads_them_again() -> None:
    site = Site(2)

    async def scenario(router: RoutedSampler) -> None:
        weights = InLearner(11)
        assert await router.publish(ROLE, weights) == weights.fingerprint
        assert set(await marks(router, 4, ROLE)) == {11}
        reads_of_two = weights.read
        await router.publish(ROLE, weights)
        assert weights.read == reads_of_two  # the version is known by its fingerprint
        site.now(0).break_down("dead")
        await asyncio.sleep(30)
        assert site.now(0).has == {"planner@1": (weights.fingerprint, 11)}
        assert weights.read == reads_of_two * 3 // 2

    routed(site, scenario)


@pytest.mark.parametrize("breaks", [False, True])
def test_weights_that_one_engine_cannot_read_as_the_learner_is_lost_are_served_by_none(breaks: bool) -> None:
    site = Site(2)

    class Lost(InLearner):
        def __getitem__(self, name: str) -> np.ndarray:
            array = super().__getitem__(name)
            if self.read == 2:  # the first engine has read before, and reads again later
                if breaks:
                    site.now(1).break_down("dead")
                raise LearnerLost("The learner's machine is lost.", "Open a new learner.")
            return array

    async def scenario(router: RoutedSampler) -> None:
        with pytest.raises(LearnerLost, match="machine is lost"):
            await router.publish(ROLE, Lost(11))
        assert (site.now(0).has, site.now(1).has, dict((await router.info()).served)) == ({}, {}, {})

    routed(site, scenario)


def test_publications_by_files_are_counted_also_of_an_engine_that_has_restarted() -> None:
    site = Site(2)

    async def scenario(router: RoutedSampler) -> None:
        for version, by_files, expected in ((1, 0, 0), (2, 1, 1), (3, 2, 2), (4, 2, 2)):
            site.now(1).by_files = by_files
            await router.publish(PolicyRef("planner", version), InLearner(version))
            assert router.counters["published_by_files"] == expected
        site.now(1).break_down("dead")
        await asyncio.sleep(30)
        site.now(1).by_files = 1
        await router.publish(PolicyRef("planner", 5), InLearner(5))
        assert (await router.info()).counters["published_by_files"] == 3

    routed(site, scenario)


def test_a_publication_that_arrived_succeeds_though_the_engine_does_not_tell_its_count_in_time() -> None:
    site = Site(2)

    async def scenario(router: RoutedSampler) -> None:
        engine = site.now(1)
        answer = engine.info
        questions = 0

        async def late_at_first() -> SamplerInfo:
            nonlocal questions
            questions += 1
            if questions == 1:
                await asyncio.sleep(3.0)  # longer than the time limit of a health check
            return await answer()

        engine.info = late_at_first  # type: ignore[method-assign]
        engine.by_files = 1
        await router.publish(ROLE, InLearner(11))
        assert router._replicas[1].state == "healthy"
        assert set(await marks(router, 4, ROLE)) == {11}
        await asyncio.sleep(5.0)  # until the next health check
        assert (await router.info()).counters["published_by_files"] == 1
        assert len(site.engines[1]) == 1

    routed(site, scenario)


@pytest.mark.parametrize("is_lost", [True, False])
def test_an_engine_that_fails_while_it_publishes_is_followed_by_one_that_gets_the_weights_themselves(
    is_lost: bool,
) -> None:
    site = Site(2)
    kinds: list[tuple[str, bool]] = []

    def observe(engine: FakeEngine) -> None:
        publish = engine.publish

        async def observed(policy: PolicyRef, weights: Weights, lora: LoraSpec | None = None) -> str:
            kinds.append((engine.name, isinstance(weights, RemoteWeights)))
            if engine is site.engines[1][0]:
                engine.by_files = 1
                if is_lost:
                    engine.break_down("dead")
                raise SamplerError("The weights are lost.", "")
            return await publish(policy, weights, lora)

        engine.publish = observed  # type: ignore[method-assign]

    site.prepare = observe

    async def scenario(router: RoutedSampler) -> None:
        if is_lost:
            await router.publish(ROLE, InLearner(11))
        else:
            with pytest.raises(SyncError):
                await router.publish(ROLE, InLearner(11))
        assert kinds == [("engine-0", True), ("engine-1", True)]
        assert router.counters["published_by_files"] == 1
        if not is_lost:
            return
        await asyncio.sleep(30)
        await router.publish(PolicyRef("planner", 2), InLearner(12))
        assert kinds[2:] == [("engine-1", False), ("engine-0", True), ("engine-1", False)]
        assert router.counters["published_by_files"] == 3

    routed(site, scenario)


def test_a_version_published_while_an_engine_restarts_reaches_it() -> None:
    site = Site(2)

    async def scenario(router: RoutedSampler) -> None:
        site.now(0).break_down("dead")
        await asyncio.sleep(8)  # taken out after 5 s, back after 5 + 1 + 5
        assert router._replicas[0].state == "failed"
        await router.publish(ROLE, weights_of(11))
        assert set(await marks(router, 4, ROLE)) == {11}
        await asyncio.sleep(10)
        assert set(await marks(router, 8, ROLE)) == {11}
        assert ROLE in site.now(0).served

    routed(site, scenario)


def test_an_engine_that_comes_back_while_a_version_is_published_has_it_too() -> None:
    site = Site(2)

    async def scenario(router: RoutedSampler) -> None:
        site.now(0).break_down("dead")
        await asyncio.sleep(8)
        site.publish_seconds = 20.0
        publishing = asyncio.create_task(router.publish(ROLE, weights_of(11)))
        await asyncio.sleep(10)  # the new engine has started by now, and waits
        assert len(site.engines[0]) == 2
        await publishing
        assert set(await marks(router, 8, ROLE)) == {11}
        await asyncio.sleep(30)
        assert set(await marks(router, 8, ROLE)) == {11}
        assert site.now(0).served

    routed(site, scenario)


def test_what_a_restarted_engine_had_cached_is_forgotten() -> None:
    site = Site(2)

    async def scenario(router: RoutedSampler) -> None:
        await mark(router)
        warm = next(i for i in range(2) if site.now(i).served)
        site.now(warm).break_down("dead")
        await asyncio.sleep(30)
        other = asyncio.create_task(mark(router, prompt=[1] * 40))
        await asyncio.sleep(0.5)
        assert site.now(warm).running == 1
        await mark(router)
        assert len(site.now(1 - warm).served) == 1
        await other

    routed(site, scenario)


def test_an_engine_that_forgot_its_versions_is_taken_out_and_its_requests_are_not_refused() -> None:
    site = Site(2)

    async def scenario(router: RoutedSampler) -> None:
        await router.publish(ROLE, weights_of(11))
        site.now(0).has.clear()  # restarted behind the router's back
        assert set(await marks(router, 6, ROLE)) == {11}
        assert "lost what was published: planner@1 is missing" in fault(router, 0)

    routed(site, scenario)


def test_engines_may_hold_the_full_weights_of_one_version_only() -> None:
    site = Site(2)
    site.one_version, site.publish_seconds = True, 20.0
    newer = PolicyRef("planner", 2)

    async def scenario(router: RoutedSampler) -> None:
        await router.publish(ROLE, weights_of(11))
        await router.publish(newer, weights_of(12))  # health checks look on meanwhile
        await asyncio.sleep(20)
        assert set(await marks(router, 4, newer)) == {12}
        with pytest.raises(RequestRefused, match="planner@1 is not served"):
            await mark(router, ROLE)
        await router.retire(ROLE)
        assert router.counters["restarts"] == 0
        site.now(0).break_down("dead")
        await asyncio.sleep(60)
        assert set(site.now(0).has) == {"planner@2"}
        site.now(1).has.clear()
        await asyncio.sleep(60)
        assert router.counters["restarts"] == 2

    routed(site, scenario)


def test_an_unknown_version_is_refused_without_asking_an_engine() -> None:
    site = Site(2)

    async def scenario(router: RoutedSampler) -> None:
        with pytest.raises(RequestRefused, match="planner@7 is not served"):
            await mark(router, PolicyRef("planner", 7))
        assert not any(engine.served for engine in site.all())

    routed(site, scenario)


def test_an_engine_that_dies_while_a_version_is_published_gets_it_when_it_is_back() -> None:
    site = Site(2)

    async def scenario(router: RoutedSampler) -> None:
        site.now(0).break_down("hung")
        assert await router.publish(ROLE, weights_of(11)) == fingerprint(weights_of(11))
        assert set(await marks(router, 4, ROLE)) == {11}
        await asyncio.sleep(60)
        assert set(site.now(0).has) == {"planner@1"}

    routed(site, scenario, CONTROL_SECONDS=20.0)


def test_a_version_published_while_all_engines_are_gone_waits_for_one() -> None:
    site = Site(2)

    async def scenario(router: RoutedSampler) -> None:
        for engine in site.all():
            engine.break_down("dead")
        assert await router.publish(ROLE, weights_of(11)) == fingerprint(weights_of(11))
        assert set(await marks(router, 4, ROLE)) == {11}

    routed(site, scenario)
