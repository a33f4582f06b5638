"""Coroutines run from plain code, with and without a loop that is already running."""

from __future__ import annotations

import asyncio
import contextvars
import threading

import pytest

from cotune.anywhere import run_anywhere

_VALUE = contextvars.ContextVar("value", default=0)


async def _where() -> tuple[str, int]:
    await asyncio.sleep(0)
    return threading.current_thread().name, _VALUE.get()


def test_without_a_loop_it_runs_in_this_thread():
    assert run_anywhere(_where()) == (threading.current_thread().name, 0)


def test_inside_a_running_loop_it_runs_in_another_thread_with_the_same_context():
    async def notebook() -> tuple[str, int]:
        _VALUE.set(7)
        return run_anywhere(_where())

    thread, value = asyncio.run(notebook())
    assert thread != threading.current_thread().name
    assert value == 7


def test_errors_come_through():
    async def fails() -> None:
        raise KeyError("x")

    async def notebook() -> None:
        run_anywhere(fails())

    with pytest.raises(KeyError):
        asyncio.run(notebook())
