"""Cancelling the application's coroutines, and leaving behind those that catch their cancellation."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from pathlib import Path

import pytest

import cotune.runtime.cancellation
from cotune.episodes.run_sync import run_sync
from cotune.runtime.cancellation import await_cancellable

STUBBORN = """
import asyncio
import cotune.runtime.cancellation
from cotune.episodes.run_sync import run_sync
from cotune.runtime.cancellation import await_cancellable

cotune.runtime.cancellation.GRACE = 0.2

async def retry_forever():
    while True:
        try:
            await asyncio.sleep(60)
        except:
            pass

async def main():
    try:
        async with asyncio.timeout(0.1):
            await await_cancellable(retry_forever())
    except TimeoutError as error:
        print("; ".join(error.__cause__.__notes__))

run_sync(main())
print("ended")
"""


def test_code_that_catches_its_cancellation_keeps_neither_the_run_nor_the_process(tmp_path: Path) -> None:
    script = tmp_path / "stubborn.py"
    script.write_text(STUBBORN)
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    notes, last = ended.stdout.splitlines()
    assert "in retry_forever" in notes and "catches its own cancellation" in notes
    assert last == "ended"
    assert "Tasks of the application that catch every cancellation are left behind (1)" in ended.stderr


def test_code_that_cleans_up_after_its_cancellation_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cotune.runtime.cancellation, "GRACE", 20.0)
    events: list[str] = []

    async def cleans_up() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            events.append("cleaned up")

    async def main() -> None:
        async with asyncio.timeout(0.05):
            await await_cancellable(cleans_up(), lambda: events.append("cancelled"))

    with pytest.raises(TimeoutError) as raised:
        run_sync(main())
    assert events == ["cancelled", "cleaned up"]
    assert raised.value.__cause__ is not None
    (note,) = raised.value.__cause__.__notes__
    assert note.startswith("it waits at") and note.endswith("in cleans_up: await asyncio.sleep(60)")


def test_tasks_that_the_application_left_are_cancelled_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    cancelled: list[str] = []

    async def background() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append("background")
            raise

    async def main() -> asyncio.Task[None]:
        task = asyncio.create_task(background())
        await asyncio.sleep(0.01)
        return task

    with caplog.at_level(logging.WARNING, "cotune"):
        assert run_sync(main()).cancelled()
    assert cancelled == ["background"]
    assert not caplog.messages
