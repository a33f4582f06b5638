"""Traces of several engines: each tells its own, and one that does not is named and serves on."""

from __future__ import annotations

import asyncio

from cotune.integrations.cluster.router.router import RoutedSampler
from tests.integrations.cluster.fake_engines import Site
from tests.integrations.cluster.routed import mark, routed


def test_engines_that_cannot_be_traced_are_named_and_no_fault_of_theirs_is_counted() -> None:
    site = Site(5)

    async def scenario(router: RoutedSampler) -> None:
        for index in (0, 1):
            site.now(index).break_down("refuses")
        await router.begin_trace()
        for index in (0, 1):
            site.now(index).break_down("well")
        site.now(2).break_down("dead")
        site.now(3).break_down("crash")
        await asyncio.sleep(30)
        await mark(router)
        traces = await router.end_trace()
        assert [span.name for trace in traces for span in trace.spans] == ["engine-4"]
        assert sorted(note for trace in traces for note in trace.notes) == [
            "not traced: engine-0: It keeps no clock",
            "not traced: engine-1: It keeps no clock",
            "not traced: engine-2: it was taken out meanwhile",
            "not traced: engine-3: OSError: the disk is full",
        ]
        assert [len(engines) for engines in site.engines] == [1, 1, 2, 1, 1]

    routed(site, scenario)


def test_a_second_trace_begins_anew() -> None:
    async def scenario(router: RoutedSampler) -> None:
        for _ in range(2):
            await router.begin_trace()
            traces = await router.end_trace()
            assert [span.name for trace in traces for span in trace.spans] == ["engine-0", "engine-1"]
            assert not any(trace.notes for trace in traces)

    routed(Site(2), scenario)
