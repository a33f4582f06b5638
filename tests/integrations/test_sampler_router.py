"""The router over engines that break: every request is answered with its version's weights, or says why not."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from cotune.errors import ConfigError, EngineLost, RequestRefused, SamplerError, SampleTimeout, SyncError
from cotune.integrations.router import Router
from cotune.integrations.router_settings import RouterSettings
from cotune.policies import LoraSpec
from cotune.records import PolicyRef
from cotune.sampler import SamplingParams, fingerprint
from tests.integrations.fake_engines import BASE_MARK, GARBAGE, FakeEngine, Site, jump, weights_of

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


def test_requests_spread_and_a_conversation_stays() -> None:
    site = Site(3)

    async def scenario(router: Router) -> None:
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


def test_a_version_is_published_to_all_and_its_answers_are_its_own() -> None:
    site = Site(2)

    async def scenario(router: Router) -> None:
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

    async def scenario(router: Router) -> None:
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

    routed(site, scenario, max_in_flight=1)  # four of the six have not even begun when it is retired


def test_an_engine_where_something_else_arrives_is_named_and_the_version_is_served_by_none() -> None:
    site = Site(3)

    async def scenario(router: Router) -> None:
        site.now(1).break_down("alters")
        with pytest.raises(SyncError, match=r"planner@1 .* engine-1: it arrived with fingerprint ffff"):
            await router.publish(ROLE, weights_of(11))
        assert [engine.has for engine in site.all()] == [{}, {}, {}]
        with pytest.raises(RequestRefused, match="planner@1 is not served"):
            await mark(router, ROLE)
        site.now(1).break_down("well")
        assert await router.publish(ROLE, weights_of(12)) == fingerprint(weights_of(12))
        assert set(await marks(router, 6, ROLE)) == {12}

    routed(site, scenario)


def test_weights_that_every_engine_refuses_are_refused() -> None:
    async def scenario(router: Router) -> None:
        with pytest.raises(RequestRefused, match="not finite"):
            await router.publish(ROLE, {"w": np.array([np.nan], np.float32)})

    routed(Site(2), scenario)


def test_weights_may_change_after_they_were_published() -> None:
    site, weights = Site(1), weights_of(11)

    async def scenario(router: Router) -> None:
        await router.publish(ROLE, weights)
        weights["w"][0] = 99
        site.now(0).break_down("dead")
        assert await mark(router, ROLE) == 11

    routed(site, scenario)


def test_a_restarted_engine_has_all_live_versions_before_it_takes_requests() -> None:
    site, events = Site(2), []
    kept, gone = PolicyRef("coder", 3), PolicyRef("coder", 2)

    async def scenario(router: Router) -> None:
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
        stats = router.stats()
        assert (stats.counters["unhealthy"], stats.counters["restarts"]) == (1, 1)
        assert (stats.replicas["engine-0"].state, stats.replicas["engine-0"].restarts) == ("healthy", 1)
        assert stats.replicas["engine-0"].fault == "The engine is gone"

    routed(site, scenario, events)
    assert events == [
        "Engine engine-0 is taken out: The engine is gone.",
        "Engine engine-0 is restarted in 1 s (1 of 5).",
        "Engine engine-0 is back, with 2 published versions.",
    ]


def test_a_version_published_while_an_engine_restarts_reaches_it() -> None:
    site = Site(2)

    async def scenario(router: Router) -> None:
        site.now(0).break_down("dead")
        await asyncio.sleep(8)  # taken out after 5 s, back after 5 + 1 + 5
        assert router.stats().replicas["engine-0"].state == "failed"
        await router.publish(ROLE, weights_of(11))
        assert set(await marks(router, 4, ROLE)) == {11}
        await asyncio.sleep(10)
        assert set(await marks(router, 8, ROLE)) == {11}
        assert ROLE in site.now(0).served

    routed(site, scenario)


def test_an_engine_that_comes_back_while_a_version_is_published_has_it_too() -> None:
    site = Site(2)

    async def scenario(router: Router) -> None:
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

    async def scenario(router: Router) -> None:
        await mark(router)
        home = next(i for i in range(2) if site.now(i).served)
        site.now(home).break_down("dead")
        await asyncio.sleep(30)
        other = asyncio.create_task(mark(router, prompt=[1] * 40))
        await asyncio.sleep(0.5)
        assert site.now(home).running == 1
        await mark(router)
        assert len(site.now(1 - home).served) == 1
        await other

    routed(site, scenario)


def test_an_engine_that_starts_too_late_is_ended() -> None:
    site = Site(2)

    async def scenario(router: Router) -> None:
        site.start_seconds, site.stubborn = 50.0, True
        site.now(0).break_down("dead")
        await asyncio.sleep(45)
        assert router.counters["failed_starts"] == 1
        assert "did not start within 20 s" in router.stats().replicas["engine-0"].fault
        site.start_seconds = 5.0
        await asyncio.sleep(60)
        first, late, current = site.engines[0][0], site.engines[0][-1], router._replicas[0].engine.sampler
        assert late.closed and first.closed
        assert not current.closed

    routed(site, scenario, start_timeout=20.0, backoff=10.0)


def test_an_engine_that_forgot_its_versions_is_taken_out_and_its_requests_are_not_refused() -> None:
    site = Site(2)

    async def scenario(router: Router) -> None:
        await router.publish(ROLE, weights_of(11))
        site.now(0).has.clear()  # restarted behind the router's back
        assert set(await marks(router, 6, ROLE)) == {11}
        assert "lost what was published: planner@1 is missing" in router.stats().replicas["engine-0"].fault

    routed(site, scenario)


def test_a_server_that_outlived_its_connection_is_not_published_to_again_and_loses_what_was_retired() -> None:
    site = Site(1)
    older = PolicyRef("planner", 0)

    async def scenario(router: Router) -> None:
        await router.publish(older, weights_of(10))
        await router.publish(ROLE, weights_of(11))
        first, published = site.now(0), []

        def same_server(engine: FakeEngine) -> None:
            engine.has = dict(first.has)
            inner = engine.publish

            async def noted(policy: PolicyRef, *rest: Any) -> str:
                published.append(policy)
                return await inner(policy, *rest)

            engine.publish = noted

        site.prepare = same_server
        first.break_down("hung")
        await asyncio.sleep(7.5)
        await router.retire(older)
        assert await mark(router, ROLE) == 11
        assert set(site.now(0).has) == {"planner@1"}
        assert published == []

    routed(site, scenario)


def test_engines_may_hold_the_full_weights_of_one_version_only() -> None:
    site = Site(2)
    site.one_version, site.publish_seconds = True, 20.0
    newer = PolicyRef("planner", 2)

    async def scenario(router: Router) -> None:
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


@pytest.mark.parametrize("mode", ["dead", "hung", "stuck", "crash", "cancels", "refuses", *GARBAGE])
def test_requests_of_a_broken_engine_are_answered_by_another(mode: str) -> None:
    site = Site(2, pace=4.0)

    async def scenario(router: Router) -> Counter[str]:
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

    async def scenario(router: Router) -> None:
        site.now(0).break_down(mode)
        for _ in range(6):
            await marks(router, 6)
        await asyncio.sleep(30)
        assert [len(engines) for engines in site.engines] == [2, 1]
        assert router.counters["faulty"] == 1
        assert "of its last" in router.stats().replicas["engine-0"].fault

    routed(site, scenario)


def test_one_bad_answer_in_many_takes_no_engine_out() -> None:
    site = Site(2)

    async def scenario(router: Router) -> None:
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

    async def scenario(router: Router) -> None:
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

    async def scenario(router: Router) -> None:
        for _ in range(10):
            with pytest.raises(RequestRefused, match="600 tokens"):
                await mark(router, prompt=[1] * 600)
        assert router.counters["retried"] == router.counters["restarts"] == 0
        assert router.counters["refused"] == 10

    routed(site, scenario)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_an_error_that_healthy_engines_agree_on_is_the_requests_own(count: int) -> None:
    site = Site(count)
    site.prepare = lambda engine: engine.break_down("refuses")

    async def scenario(router: Router) -> None:
        for _ in range(5):
            with pytest.raises(RequestRefused, match="I would rather not"):
                await mark(router)
        assert router.counters["retried"] == 5
        assert router.counters["restarts"] == router.counters["faulty"] == 0

    routed(site, scenario)


def test_an_engine_that_answers_nothing_at_all_is_restarted_though_no_other_does_better() -> None:
    site = Site(1)

    async def scenario(router: Router) -> None:
        site.now(0).break_down("crash")
        for _ in range(10):
            with pytest.raises(RequestRefused, match="ZeroDivisionError: inside the engine"):
                await mark(router)
        assert await mark(router) == BASE_MARK
        assert "it answered none of 20 requests" in router.stats().replicas["engine-0"].fault

    routed(site, scenario)


def test_an_unknown_version_is_refused_without_asking_an_engine() -> None:
    site = Site(2)

    async def scenario(router: Router) -> None:
        with pytest.raises(RequestRefused, match="planner@7 is not served"):
            await mark(router, PolicyRef("planner", 7))
        assert not any(engine.served for engine in site.all())

    routed(site, scenario)


def test_a_callers_cancellation_reaches_the_engine_and_is_not_retried() -> None:
    site = Site(2, pace=100.0)

    async def scenario(router: Router) -> None:
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

    routed(site, scenario, max_in_flight=1)


def test_the_callers_own_time_out_ends_a_request_wherever_it_is() -> None:
    site = Site(1, pace=50.0)

    async def scenario(router: Router) -> None:
        running = asyncio.create_task(mark(router, timeout=20.0))
        waiting = asyncio.create_task(mark(router, timeout=20.0))
        for task in (running, waiting):
            with pytest.raises(SampleTimeout, match=r"within 20\.0 s"):
                await task
        assert (router.counters["late"], router.counters["retried"], router.counters["restarts"]) == (2, 0, 0)
        assert await mark(router, timeout=51.0) == BASE_MARK

    routed(site, scenario, max_in_flight=1)


def test_a_slow_engine_is_restarted_unless_too_few_would_be_left() -> None:
    def scenario_for(restarts: int) -> Callable[[Router], Awaitable[None]]:
        async def scenario(router: Router) -> None:
            for _ in range(6):
                await marks(router, 6)
            await asyncio.sleep(60)
            assert (router.counters["slow"], router.counters["restarts"]) == (restarts, restarts)

        return scenario

    def slow_first(engine: FakeEngine) -> None:
        engine.pace = 30.0 if engine.name == "engine-0" and len(engine.site.engines[0]) == 1 else 1.0

    for floor, restarts in ((1, 1), (2, 0)):
        site = Site(2)
        site.prepare = slow_first
        routed(site, scenario_for(restarts), min_healthy=floor)


def test_an_engine_whose_callers_give_up_is_slow_too() -> None:
    site = Site(2)

    async def scenario(router: Router) -> None:
        site.now(0).break_down("stuck")
        for _ in range(12):
            await asyncio.gather(*(mark(router, timeout=20.0) for _ in range(2)), return_exceptions=True)
        assert router.counters["slow"] == 1

    routed(site, scenario, slack=0.0)


def test_no_engine_has_more_requests_than_it_may_and_others_wait_in_order() -> None:
    site, order = Site(2), []

    async def ask(router: Router, i: int) -> None:
        await mark(router, prompt=[i] * 40)
        order.append(i)

    async def scenario(router: Router) -> None:
        asked = [asyncio.create_task(ask(router, i)) for i in range(40)]
        await asyncio.sleep(0.5)
        assert (router.stats().waiting, router.counters["queued"]) == (34, 34)
        await asyncio.gather(*asked)
        assert [engine.peak for engine in site.all()] == [3, 3]
        batches = [sorted(order[i : i + 6]) for i in range(0, 36, 6)]
        assert batches == [list(range(i, i + 6)) for i in range(0, 36, 6)]

    routed(site, scenario, max_in_flight=3)


def test_a_retried_request_keeps_its_place() -> None:
    site, order = Site(2, pace=10.0), []

    async def ask(router: Router, i: int) -> None:
        await mark(router, prompt=[i] * 40)
        order.append(i)

    async def scenario(router: Router) -> None:
        asked = [asyncio.create_task(ask(router, i)) for i in range(6)]
        await asyncio.sleep(1)
        site.now(0).break_down("dead")
        await asyncio.gather(*asked)
        assert sorted(order[:2]) == [0, 1]

    routed(site, scenario, max_in_flight=1)


def test_a_request_cancelled_in_the_moment_it_is_placed_frees_its_place() -> None:
    site = Site(1)

    async def scenario(router: Router) -> None:
        waiting = asyncio.create_task(mark(router))
        running = mark(router)
        await asyncio.sleep(0)  # `waiting` has been placed first
        next_one = asyncio.create_task(mark(router))
        await running
        next_one.cancel()
        await asyncio.gather(waiting, next_one, return_exceptions=True)
        assert await mark(router) == BASE_MARK

    routed(site, scenario, max_in_flight=1)


def test_an_engine_that_hangs_is_found_by_the_first_request_that_times_out() -> None:
    site = Site(2)

    async def scenario(router: Router) -> None:
        site.now(0).break_down("hung")
        begun = asyncio.get_running_loop().time()
        assert await marks(router, 2) == [BASE_MARK] * 2
        await asyncio.sleep(5)
        assert router.counters["unhealthy"] == 1
        assert asyncio.get_running_loop().time() - begun < 30

    routed(site, scenario, request_timeout=20.0, health_every=1000.0)


def test_below_the_floor_requests_wait_and_that_is_said() -> None:
    site, events = Site(2), []

    async def scenario(router: Router) -> None:
        site.now(1).break_down("dead")
        await asyncio.sleep(6)
        asked = [asyncio.create_task(mark(router)) for _ in range(3)]
        await asyncio.sleep(1)
        assert not any(engine.running for engine in site.all())
        assert router.counters["waited"] == 3
        assert (await router.info()).counters["waited"] == 3
        assert await asyncio.gather(*asked) == [BASE_MARK] * 3

    routed(site, scenario, events, min_healthy=2)
    assert "1 of 2 engines are healthy, at least 2 must be. Requests wait until more are back." in events
    assert events[-1] == "2 of 2 engines are healthy, at least 2 must be. Requests go on."


def test_when_restarts_are_used_up_everything_fails_with_cause_and_remedy() -> None:
    site, events = Site(2), []

    async def scenario(router: Router) -> None:
        begun = asyncio.get_running_loop().time()
        site.failing_starts = {0: 99, 1: 99}
        for engine in site.all():
            engine.break_down("dead")
        asked = [asyncio.create_task(mark(router)) for _ in range(4)]
        for task in asked:
            with pytest.raises(EngineLost, match="0 of 2 engines are left") as caught:
                await task
        assert "engine-0: it did not start: no memory (after 3 restarts)" in caught.value.cause
        assert "max_restarts" in caught.value.remedy
        with pytest.raises(EngineLost):
            await mark(router)
        with pytest.raises(EngineLost):
            await router.publish(ROLE, weights_of(11))
        assert (router.counters["lost"], router.counters["restarts"], router.counters["failed_starts"]) == (2, 6, 6)
        assert asyncio.get_running_loop().time() - begun >= 10 + 20 + 40 + 3 * 5  # back-off and starts

    routed(site, scenario, events, max_restarts=3, backoff=10.0)
    assert "Engine engine-1 is given up: it did not start: no memory (after 3 restarts)." in events


def test_an_engine_that_has_been_well_for_long_may_restart_again() -> None:
    site = Site(1)

    async def scenario(router: Router) -> None:
        for _ in range(5):
            await asyncio.sleep(200)
            site.now(0).break_down("dead")
            assert await mark(router) == BASE_MARK
        assert router.counters["restarts"] == 5

    routed(site, scenario, max_restarts=1, forgive_after=100.0)


def test_an_engine_that_dies_while_a_version_is_published_gets_it_when_it_is_back() -> None:
    site = Site(2)

    async def scenario(router: Router) -> None:
        site.now(0).break_down("hung")
        assert await router.publish(ROLE, weights_of(11)) == fingerprint(weights_of(11))
        assert set(await marks(router, 4, ROLE)) == {11}
        await asyncio.sleep(60)
        assert set(site.now(0).has) == {"planner@1"}

    routed(site, scenario, publish_timeout=20.0)


def test_a_version_published_while_all_engines_are_gone_waits_for_one() -> None:
    site = Site(2)

    async def scenario(router: Router) -> None:
        for engine in site.all():
            engine.break_down("dead")
        assert await router.publish(ROLE, weights_of(11)) == fingerprint(weights_of(11))
        assert set(await marks(router, 4, ROLE)) == {11}

    routed(site, scenario)


def test_engines_that_fail_to_start_at_first_are_tried_again() -> None:
    site = Site(2)
    site.failing_starts = {0: 2, 1: 1}

    async def scenario(router: Router) -> None:
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
        raise ConfigError("model", "nowhere", "a model")

    async def scenario() -> None:
        router = Router([misconfigured, *site.makes()], settings(), None)
        with pytest.raises(ConfigError, match="nowhere"):
            await router.open()

    jump(scenario())
    assert all(engine.closed for engine in site.all())


def test_closing_fails_what_is_pending_and_what_comes() -> None:
    site = Site(1, pace=100.0)

    async def scenario(router: Router) -> None:
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

    routed(site, scenario, max_in_flight=2, max_attempts=1)


def test_settings_that_cannot_be_are_refused() -> None:
    for changes in (
        {"min_healthy": 3},
        {"min_healthy": 0},
        {"max_in_flight": 0},
        {"health_every": 0.0},
        {"backoff": -1.0},
    ):
        with pytest.raises(ConfigError, match=next(iter(changes))):
            Router(Site(2).makes(), settings(**changes), None)


MODES = ("dead", "dead", "hung", "stuck", "crash", "cancels", "forgets", "nan", "empty", "slow", "well")


@pytest.mark.parametrize("seed", range(40))
def test_random_faults_at_random_moments(seed: int) -> None:
    """Requests, versions and faults at random: each answer is of the version that was asked for, each failure is
    named, and nothing is left behind."""
    chance = random.Random(seed)
    count = chance.randint(1, 4)
    site = Site(count, pace=chance.choice([0.5, 3.0]))
    live: dict[PolicyRef, int] = {BASE: BASE_MARK}
    ended: Counter[str] = Counter()

    async def ask(router: Router) -> None:
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
            assert all(replica.state == "lost" for replica in router.stats().replicas.values())
            ended["lost"] += 1
        except RequestRefused as error:
            assert "ZeroDivisionError" in str(error)
            ended["refused"] += 1
        except SamplerError as error:
            assert "was not answered in 3 attempts" in str(error), error
            ended["failed"] += 1
        except asyncio.CancelledError:
            ended["cancelled"] += 1

    async def train(router: Router) -> None:
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

    async def scenario(router: Router) -> None:
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
        stats = router.stats()
        assert stats.waiting == 0
        assert all(replica.running == 0 for replica in stats.replicas.values())
        assert all(engine.load == 0 for engine in router._queue.healthy())
        for engines in site.engines:
            assert all(engine.closed for engine in engines[:-1])
        wanted = {key for key in map(str, live) if not key.endswith("@0")}
        for engine in router._queue.healthy():
            assert set(engine.sampler.has) >= wanted
        for kind in ("answered", "late", "cancelled", "refused"):
            assert router.counters[kind] == ended[kind]
        assert router.counters["failed"] == ended["failed"] + ended["lost"]

    limits = {"max_restarts": 2} if seed % 4 == 0 else {"max_restarts": 20, "forgive_after": 60.0}
    routed(site, scenario, max_in_flight=4, outcomes=8, publish_timeout=30.0, **limits)
    assert all(engine.peak <= 4 for engine in site.all())
    assert sum(ended.values()) == 150
    assert ended["answered"] > 50 or ended["lost"]
    assert seed % 4 == 0 or not ended["lost"]
