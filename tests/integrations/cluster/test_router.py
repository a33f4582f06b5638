"""The router over engines that break: every request is answered, or fails with what stands against it."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from cotune.errors import ConfigError, EngineLost, RequestRefused, SamplerError, SampleTimeout
from cotune.integrations.cluster.router.router import RoutedSampler
from tests.integrations.cluster.fake_engines import BASE_MARK, GARBAGE, FakeEngine, Site, jump, weights_of
from tests.integrations.cluster.routed import PROMPT, ROLE, fault, mark, marks, routed

pytestmark = pytest.mark.slow


def test_requests_spread_and_a_conversation_stays() -> None:
    site = Site(3)

    async def scenario(router: RoutedSampler) -> None:
        await marks(router, 9)
        assert [len(engine.served) for engine in site.all()] == [3, 3, 3]
        before = [len(engine.served) for engine in site.all()]
        talk = list(PROMPT)
        for _ in range(6):
            await mark(router, prompt=talk)
            talk += [1] * 10
        grown = [len(e.served) - b for e, b in zip(site.all(), before, strict=True)]
        assert sorted(grown) == [0, 0, 6]

    routed(site, scenario)


def test_engines_sleep_and_one_that_does_not_wake_as_it_was_is_replaced() -> None:
    site = Site(2)

    async def scenario(router: RoutedSampler) -> None:
        await router.sleep()
        assert [engine.asleep for engine in site.all()] == [True, True]
        site.now(0).mode = "alters"
        await router.wake()
        assert "did not wake: It woke with other weights" in fault(router, 0)
        await marks(router, 8)
        await asyncio.sleep(30)
        assert [engine.asleep for engine in (site.now(0), site.now(1))] == [False, False]
        assert router.counters["unhealthy"] == router.counters["restarts"] == 1

    routed(site, scenario)


def test_an_engine_that_does_not_start_in_time_is_tried_again() -> None:
    site = Site(2)

    async def scenario(router: RoutedSampler) -> None:
        site.start_seconds = 50.0
        site.now(0).break_down("dead")
        await asyncio.sleep(45)
        assert router.counters["failed_starts"] == 1
        assert "did not start within 20 s" in fault(router, 0)
        site.start_seconds = 5.0
        await asyncio.sleep(60)
        assert len(site.engines[0]) == 2
        assert not site.now(0).closed

    routed(site, scenario, START_SECONDS=20.0, BACKOFF=10.0)


@pytest.mark.parametrize("mode", ["dead", "hung", "stuck", "crash", "cancels", "refuses", *GARBAGE])
def test_requests_of_a_broken_engine_are_answered_by_another(mode: str) -> None:
    site = Site(2, pace=4.0)

    async def scenario(router: RoutedSampler) -> Counter[str]:
        await router.publish(ROLE, weights_of(11))
        asked = asyncio.create_task(marks(router, 10, ROLE))
        await asyncio.sleep(1)
        assert [engine.running for engine in site.all()] == [5, 5]
        site.now(0).break_down(mode)
        assert await asked == [11] * 10
        assert set(await marks(router, 10, ROLE)) == {11}
        return router.counters

    count = routed(site, scenario)
    if mode != "refuses":  # only new requests meet that one
        assert count["retried"] >= 5
    assert count["answered"] == 20
    assert count["failed"] == count["refused"] == 0
    kind = {"dead": "died", "hung": "died", "stuck": "timeouts"}.get(mode, "errors")
    assert count["garbage" if mode in GARBAGE else kind] >= 3


@pytest.mark.parametrize("mode", ["stuck", "crash", *GARBAGE])
def test_an_engine_that_only_fails_is_restarted_though_it_says_that_it_is_well(mode: str) -> None:
    site = Site(2)

    async def scenario(router: RoutedSampler) -> None:
        site.now(0).break_down(mode)
        for _ in range(6):
            await marks(router, 6)
        await asyncio.sleep(30)
        assert [len(engines) for engines in site.engines] == [2, 1]
        assert router.counters["faulty"] == 1
        assert "5 requests in a row failed; the last one: " in fault(router, 0)

    routed(site, scenario)


def test_one_bad_answer_in_many_takes_no_engine_out() -> None:
    site = Site(2)

    async def scenario(router: RoutedSampler) -> None:
        await marks(router, 20)
        site.now(0).break_down("nan")
        await marks(router, 4)
        site.now(0).break_down("well")
        await marks(router, 20)
        assert router.counters["garbage"] == router.counters["retried"] == 2
        assert [len(engines) for engines in site.engines] == [1, 1]

    routed(site, scenario)


def test_attempts_are_bounded_and_listed() -> None:
    site = Site(3)
    site.prepare = lambda engine: engine.break_down("nan")

    async def scenario(router: RoutedSampler) -> None:
        with pytest.raises(SamplerError) as caught:
            await mark(router)
        text = str(caught.value)
        assert "anyone@0 was not answered in 3 attempts" in text
        assert all(
            f"engine-{i}: garbage, candidate 1 has a log-probability that is not finite" in text for i in range(3)
        )
        assert (router.counters["retried"], router.counters["failed"]) == (2, 1)

    routed(site, scenario)


def test_a_refused_request_is_not_retried_and_blames_nobody() -> None:
    site = Site(2)

    async def scenario(router: RoutedSampler) -> None:
        for _ in range(10):
            with pytest.raises(RequestRefused, match="600 tokens"):
                await mark(router, prompt=[1] * 600)
        assert router.counters["retried"] == router.counters["restarts"] == 0
        assert router.counters["refused"] == 10

    routed(site, scenario)


@pytest.mark.parametrize("count", [2, 3])
def test_an_error_that_two_healthy_engines_raise_is_the_requests_own(count: int) -> None:
    site = Site(count)
    site.prepare = lambda engine: engine.break_down("refuses")

    async def scenario(router: RoutedSampler) -> None:
        for _ in range(5):
            with pytest.raises(RequestRefused, match="I would rather not"):
                await mark(router)
        assert router.counters["retried"] == 5
        assert router.counters["restarts"] == router.counters["faulty"] == 0

    routed(site, scenario)


def test_a_single_engine_that_raises_errors_only_is_restarted() -> None:
    site = Site(1)

    async def scenario(router: RoutedSampler) -> None:
        site.now(0).break_down("crash")
        for attempts in (3, 3):
            with pytest.raises(SamplerError, match=f"in {attempts} attempts: engine-0: ZeroDivisionError"):
                await mark(router)
        assert await mark(router) == BASE_MARK
        assert "ZeroDivisionError: inside the engine" in fault(router, 0)
        assert router.counters["errors"] == 6

    routed(site, scenario)


def test_a_callers_cancellation_reaches_the_engine_and_is_not_retried() -> None:
    site = Site(2, pace=100.0)

    async def scenario(router: RoutedSampler) -> None:
        asked = [asyncio.create_task(mark(router)) for _ in range(3)]  # two run, one waits
        await asyncio.sleep(1)
        for task in asked:
            task.cancel()
        done = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(error) for error in done] == [asyncio.CancelledError] * 3
        await asyncio.sleep(1)
        assert [engine.running for engine in site.all()] == [0, 0]
        assert [engine.cancelled for engine in site.all()] == [1, 1]
        assert (router.counters["cancelled"], router.counters["retried"]) == (3, 0)
        assert len(router._queue) == 0

    routed(site, scenario, IN_FLIGHT=1)


def test_the_callers_own_time_out_ends_a_request_wherever_it_is() -> None:
    site = Site(1, pace=50.0)

    async def scenario(router: RoutedSampler) -> None:
        running = asyncio.create_task(mark(router, timeout=20.0))
        waiting = asyncio.create_task(mark(router, timeout=20.0))
        for task in (running, waiting):
            with pytest.raises(SampleTimeout, match=r"within 20\.0 s"):
                await task
        assert (router.counters["late"], router.counters["retried"], router.counters["restarts"]) == (2, 0, 0)
        assert await mark(router, timeout=51.0) == BASE_MARK

    routed(site, scenario, IN_FLIGHT=1)


def test_no_engine_has_more_requests_than_it_may_and_others_wait_in_order() -> None:
    site, order = Site(2), []

    async def ask(router: RoutedSampler, i: int) -> None:
        await mark(router, prompt=[i] * 40)
        order.append(i)

    async def scenario(router: RoutedSampler) -> None:
        asked = [asyncio.create_task(ask(router, i)) for i in range(40)]
        await asyncio.sleep(0.5)
        assert (len(router._queue), router.counters["queued"]) == (34, 34)
        await asyncio.gather(*asked)
        assert [engine.peak for engine in site.all()] == [3, 3]
        batches = [sorted(order[i : i + 6]) for i in range(0, 36, 6)]
        assert batches == [list(range(i, i + 6)) for i in range(0, 36, 6)]

    routed(site, scenario, IN_FLIGHT=3)


def test_a_retried_request_keeps_its_place() -> None:
    site, order = Site(2, pace=10.0), []

    async def ask(router: RoutedSampler, i: int) -> None:
        await mark(router, prompt=[i] * 40)
        order.append(i)

    async def scenario(router: RoutedSampler) -> None:
        asked = [asyncio.create_task(ask(router, i)) for i in range(6)]
        await asyncio.sleep(1)
        site.now(0).break_down("dead")
        await asyncio.gather(*asked)
        assert sorted(order[:2]) == [0, 1]

    routed(site, scenario, IN_FLIGHT=1)


def test_a_request_cancelled_in_the_moment_it_is_placed_frees_its_place() -> None:
    site = Site(1)

    async def scenario(router: RoutedSampler) -> None:
        waiting = asyncio.create_task(mark(router))
        running = mark(router)
        await asyncio.sleep(0)  # `waiting` has been placed first
        next_one = asyncio.create_task(mark(router))
        await running
        next_one.cancel()
        await asyncio.gather(waiting, next_one, return_exceptions=True)
        assert await mark(router) == BASE_MARK

    routed(site, scenario, IN_FLIGHT=1)


def test_an_engine_that_hangs_is_found_by_the_first_request_that_times_out() -> None:
    site = Site(2)

    async def scenario(router: RoutedSampler) -> None:
        site.now(0).break_down("hung")
        begun = asyncio.get_running_loop().time()
        assert await marks(router, 2) == [BASE_MARK] * 2
        await asyncio.sleep(5)
        assert router.counters["unhealthy"] == 1
        assert asyncio.get_running_loop().time() - begun < 30

    routed(site, scenario, REQUEST_SECONDS=20.0, HEALTH_EVERY=1000.0)


def test_below_the_floor_requests_wait_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    site = Site(2)

    async def scenario(router: RoutedSampler) -> None:
        site.now(1).break_down("dead")
        await asyncio.sleep(6)
        asked = [asyncio.create_task(mark(router)) for _ in range(3)]
        await asyncio.sleep(1)
        assert not any(engine.running for engine in site.all())
        assert router.counters["waited"] == 3
        assert (await router.info()).counters["waited"] == 3
        assert await asyncio.gather(*asked) == [BASE_MARK] * 3

    routed(site, scenario, min_healthy=2)
    assert "1 of 2 engines are healthy; at least 2 are needed. Requests wait until more are back." in caplog.messages
    assert caplog.messages[-1] == "2 of 2 engines are healthy; at least 2 are needed. Requests continue."


def test_when_restarts_are_used_up_everything_fails_with_cause_and_remedy(caplog: pytest.LogCaptureFixture) -> None:
    site = Site(2)

    async def scenario(router: RoutedSampler) -> None:
        begun = asyncio.get_running_loop().time()
        site.failing_starts = {0: 99, 1: 99}
        for engine in site.all():
            engine.break_down("dead")
        asked = [asyncio.create_task(mark(router)) for _ in range(4)]
        for task in asked:
            with pytest.raises(EngineLost, match="0 of 2 engines are left") as caught:
                await task
        assert "engine-0: it did not start: no memory (after 3 restarts)" in caught.value.cause
        assert "continue with --resume" in caught.value.remedy
        with pytest.raises(EngineLost):
            await mark(router)
        with pytest.raises(EngineLost):
            await router.publish(ROLE, weights_of(11))
        assert (router.counters["lost"], router.counters["restarts"], router.counters["failed_starts"]) == (2, 6, 6)
        assert asyncio.get_running_loop().time() - begun >= 10 + 20 + 40 + 3 * 5  # back-off and starts

    routed(site, scenario, max_restarts=3, BACKOFF=10.0)
    assert "Engine engine-1 is given up: it did not start: no memory (after 3 restarts)." in caplog.messages


def test_an_engine_that_has_been_well_for_long_may_restart_again() -> None:
    site = Site(1)

    async def scenario(router: RoutedSampler) -> None:
        for _ in range(5):
            await asyncio.sleep(200)
            site.now(0).break_down("dead")
            assert await mark(router) == BASE_MARK
        assert router.counters["restarts"] == 5

    routed(site, scenario, max_restarts=1, FORGIVE_AFTER=100.0)


def test_engines_that_fail_to_start_at_first_are_tried_again() -> None:
    site = Site(2)
    site.failing_starts = {0: 2, 1: 1}

    async def scenario(router: RoutedSampler) -> None:
        assert await mark(router) == BASE_MARK
        assert router.counters["failed_starts"] == 3

    routed(site, scenario, min_healthy=2)


def test_a_router_that_cannot_start_says_why_and_leaves_nothing() -> None:
    site = Site(2)
    site.failing_starts = {0: 99}
    with pytest.raises(EngineLost, match="engine-0: it did not start: no memory"):
        routed(site, lambda router: mark(router), min_healthy=2, max_restarts=1)
    assert all(engine.closed for engine in site.all())

    async def misconfigured() -> FakeEngine:
        raise ConfigError("model", "nowhere", "must be a model")

    async def scenario() -> None:
        with pytest.raises(ConfigError, match="nowhere"):
            await RoutedSampler.open([misconfigured, *site.makes()])

    jump(scenario())
    assert all(engine.closed for engine in site.all())


def test_closing_fails_what_is_pending_and_what_comes() -> None:
    site = Site(1, pace=100.0)

    async def scenario(router: RoutedSampler) -> None:
        asked = [asyncio.create_task(mark(router)) for _ in range(3)]
        site.publish_seconds = 50.0
        asked.append(asyncio.create_task(router.publish(ROLE, weights_of(11))))
        await asyncio.sleep(1)
        await router.aclose()
        for task in asked:
            with pytest.raises(SamplerError, match="closed"):
                await task
        for later in (mark(router), router.publish(ROLE, weights_of(1)), router.info()):
            with pytest.raises(SamplerError, match="closed"):
                await later

    routed(site, scenario, IN_FLIGHT=2)
