"""Coroutines run from plain code, with and without a loop that is already running."""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import subprocess
import sys
import threading

import pytest

from cotune.episodes.run_sync import run_sync
from cotune.runtime import interrupts
from cotune.runtime.interrupts import stop_by
from cotune.runtime.user_code import pooled_thread

_VALUE = contextvars.ContextVar("value", default=0)


async def _where() -> tuple[str, int]:
    await asyncio.sleep(0)
    return threading.current_thread().name, _VALUE.get()


def test_without_a_loop_it_runs_in_this_thread():
    assert run_sync(_where()) == (threading.current_thread().name, 0)


def test_inside_a_running_loop_it_runs_in_another_thread_with_the_same_context():
    async def notebook() -> tuple[str, int]:
        _VALUE.set(7)
        return run_sync(_where())

    thread, value = asyncio.run(notebook())
    assert thread != threading.current_thread().name
    assert value == 7


def test_errors_come_through():
    async def fails() -> None:
        raise KeyError("x")

    async def notebook() -> None:
        run_sync(fails())

    with pytest.raises(KeyError):
        asyncio.run(notebook())


def test_an_error_has_no_other_one_before_it():
    """A traceback that begins with an error of cotune's own misleads about the cause."""

    async def fails() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError) as raised:
        run_sync(fails())
    assert raised.value.__context__ is None


def test_signals_that_come_together_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """`timeout` sends its signal to the process, and then to its group."""
    monkeypatch.setattr(interrupts, "TOGETHER", 60.0)
    stops: list[str] = []

    async def stopped() -> str:
        with stop_by(lambda: stops.append("stop")):
            for _ in range(3):
                signal.raise_signal(signal.SIGTERM)
                await asyncio.sleep(0)
        return "done"

    assert (run_sync(stopped()), stops) == ("done", ["stop"])


def test_a_run_in_another_thread_does_not_take_the_signals_of_the_main_one() -> None:
    stops: list[str] = []

    async def in_thread() -> None:
        with stop_by(lambda: stops.append("thread")):
            os.kill(os.getpid(), signal.SIGTERM)
            while not stops:
                await asyncio.sleep(0.01)

    async def on_main_thread() -> None:
        with stop_by(lambda: stops.append("main")):
            await asyncio.to_thread(run_sync, in_thread())

    run_sync(on_main_thread())
    assert stops == ["main"]


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signals that a test sends one after the other are two."""
    monkeypatch.setattr(interrupts, "TOGETHER", 0.0)


@pytest.mark.usefixtures("apart")
def test_signals_are_handed_back_also_when_a_second_one_breaks_off_what_cleans_up() -> None:
    """The work is cancelled after the second signal, and hands its own handling back only then."""

    async def stubborn() -> None:
        with stop_by(lambda: None):
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(0)
            signal.raise_signal(signal.SIGINT)

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KeyboardInterrupt):
        run_sync(stubborn())
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.usefixtures("apart")
def test_signals_are_handed_back_by_work_that_is_left_waiting() -> None:
    async def waits() -> None:
        with stop_by(lambda: None):
            asyncio.get_running_loop().call_soon(lambda: [signal.raise_signal(signal.SIGTERM) for _ in range(2)])
            await asyncio.sleep(60)

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KeyboardInterrupt):
        run_sync(waits())
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_cotunes_own_end_amid_an_application_is_not_called_the_applications():
    script = """
from cotune.episodes.run_sync import run_sync
from cotune.runtime.process_exit import end_process, own_process
from cotune.runtime.user_code import user_code

async def application():
    user_code.set("The workflow 'w'")
    end_process("ended at once.", 130)

own_process()
run_sync(application())
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr.splitlines()) == (130, ["cotune: ended at once."])


def test_threads_of_functions_are_used_again_and_end_with_their_loop() -> None:
    used: list[threading.Thread] = []

    async def functions() -> None:
        for _ in range(3):
            async with pooled_thread() as thread:
                await thread.run(lambda: used.append(threading.current_thread()))

    run_sync(functions())
    assert len(used) == 3 and len(set(used)) == 1
    used[0].join(10)
    assert not used[0].is_alive()
