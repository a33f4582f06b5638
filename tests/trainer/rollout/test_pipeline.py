"""Rollouts ahead of training: the order, the bound, and cancellation."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotune.trainer.rollout.pipeline import RolloutPipeline


@settings(deadline=None)
@given(steps=st.integers(1, 6), ahead=st.integers(0, 3), delays=st.lists(st.integers(0, 3), min_size=12, max_size=12))
def test_no_step_starts_more_than_ahead_of_the_one_that_trains(steps: int, ahead: int, delays: list[int]) -> None:
    started: list[int] = []
    running: set[int] = set()
    trained = 0

    async def roll_out(step: int, needed: asyncio.Event) -> list[int]:
        assert not running, "one step at a time"
        running.add(step)
        started.append(step)
        assert step <= trained + ahead
        for _ in range(delays[step]):
            await asyncio.sleep(0)
        running.clear()
        return [step]

    async def train() -> None:
        nonlocal trained
        async with RolloutPipeline(roll_out, steps=steps, ahead=ahead) as rollouts:
            for step in range(steps):
                assert await rollouts.episodes_of(step) == [step]
                for _ in range(delays[-1 - step]):
                    await asyncio.sleep(0)
                trained = step + 1

    asyncio.run(train())
    assert started == list(range(steps))


def test_the_next_step_rolls_out_while_this_one_trains() -> None:
    begun = asyncio.Event()

    async def roll_out(step: int, needed: asyncio.Event) -> list[int]:
        if step == 1:
            begun.set()
        return []

    async def train(ahead: int) -> bool:
        begun.clear()
        async with RolloutPipeline(roll_out, steps=2, ahead=ahead) as rollouts:
            await rollouts.episodes_of(0)
            await asyncio.sleep(0.01)
            return begun.is_set()

    assert asyncio.run(train(1))
    assert not asyncio.run(train(0))


def test_leaving_cancels_what_is_under_way() -> None:
    cancelled: list[int] = []

    async def roll_out(step: int, needed: asyncio.Event) -> list[int]:
        try:
            await asyncio.sleep(3600 if step else 0)
        except asyncio.CancelledError:
            cancelled.append(step)
            raise
        return []

    async def train() -> None:
        async with RolloutPipeline(roll_out, steps=5, ahead=2) as rollouts:
            await rollouts.episodes_of(0)
            await asyncio.sleep(0.01)

    asyncio.run(train())
    assert cancelled == [1]


def test_an_error_reaches_the_step_that_asks() -> None:
    async def roll_out(step: int, needed: asyncio.Event) -> list[int]:
        raise ValueError(f"step {step}")

    async def train() -> None:
        async with RolloutPipeline(roll_out, steps=5, ahead=2) as rollouts:
            await rollouts.episodes_of(0)

    with pytest.raises(ValueError, match="step 0"):
        asyncio.run(train())
