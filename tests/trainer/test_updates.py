"""Whether an engine's weights stay on the learner's GPU during an update."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from cotune.trainer.config.load import convert
from cotune.trainer.updates import ENOUGH_TOKENS, sampler_asleep, tokens_wanted
from tests.trainer.learner.learner_rows import make_rows

ROWS = {"a": make_rows(groups=2, k=2, prompt=(50, 50), response=(5, 5)), "b": make_rows(groups=1, k=1)}


class Sampler:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    async def sleep(self, keep_weights: bool) -> None:
        self.calls.append(keep_weights)

    async def wake(self) -> None:
        self.calls.append("wake")


def calls_around_an_update(room: int, **settings: Any) -> tuple[list[Any], list[str]]:
    """What the engine is told around an update, and the phases, where passes of `room` tokens fit next to it."""
    sampler, phases = Sampler(), []

    @contextlib.contextmanager
    def phase(name: str) -> Any:
        phases.append(name)
        yield

    run: Any = SimpleNamespace(
        config=convert({"model": "m", **settings}),
        sampler=sampler,
        learner=SimpleNamespace(has_room=lambda tokens: tokens <= room),
    )

    async def update() -> None:
        async with sampler_asleep(run, ROWS, SimpleNamespace(phase=phase)):  # type: ignore[arg-type]
            sampler.calls.append("update")

    asyncio.run(update())
    return sampler.calls, phases


VLLM = {"engine": "vllm"}


@pytest.mark.parametrize(("room", "sleeps"), [(220, [True]), (219, [True, False])])
def test_the_weights_stay_if_the_passes_of_these_rows_fit_next_to_them(room: int, sleeps: list[bool]) -> None:
    assert calls_around_an_update(room, **VLLM) == ([*sleeps, "update", "wake"], ["sleep", "wake"])


@pytest.mark.parametrize("settings", [{}, {**VLLM, "mode": "async"}], ids=["in process", "async"])
def test_an_engine_that_does_not_share_its_gpu_or_samples_meanwhile_stays_awake(settings: dict[str, Any]) -> None:
    assert calls_around_an_update(0, **settings) == (["update"], [])


def test_a_pass_need_not_be_larger_than_what_keeps_a_gpu_busy_but_holds_the_longest_row() -> None:
    assert tokens_wanted(ROWS) == 4 * 55
    assert tokens_wanted({"a": make_rows(groups=30, k=20, prompt=(50, 50))}) == ENOUGH_TOKENS
    assert tokens_wanted({"a": make_rows(groups=1, k=1, prompt=(20_000, 20_000), response=(1, 1))}) == 20_001
    assert tokens_wanted({}) == 0
