"""A clock that steps back while episodes are recorded: by NTP, or when a virtual machine resumes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import cotune
from cotune.recording.model_calls import open_call
from cotune.records.structs import CallRecord, Episode, Task
from cotune.storage.sqlite_store import SqliteStore
from tests.integrations.recorded import answer


class SteppingClock:
    """`time.time` with a shift."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shift = 0.0
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + self.shift)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SteppingClock:
    return SteppingClock(monkeypatch)


def test_an_episode_stays_readable_and_in_order(tmp_path: Path, clock: SteppingClock) -> None:
    @cotune.recorded
    def tool() -> int:
        clock.shift -= 3.0
        return 1

    with cotune.trace(tmp_path) as trace:
        for _ in range(3):
            call: Any = open_call(lambda: {"messages": [{"role": "user", "content": "x"}]})
            clock.shift -= 3.0
            time.sleep(0.01)
            call.finish(answer("y"))
        tool()
        trace.reward(1.0)
    with SqliteStore.open(tmp_path, read_only=True) as store:
        [episode] = store.episodes()
        calls = store.calls(episode.id)
        assert (len(calls), store.health.unreadable) == (3, 0)
    for call in calls:
        assert 0.01 <= call.latency < 1
        assert episode.started <= call.started
        assert call.started + call.latency <= episode.started + episode.latency + 1e-4
    assert [call.started for call in calls] == sorted(call.started for call in calls)
    [result] = episode.results
    assert result.started >= calls[-1].started + calls[-1].latency - 1e-4
    assert 0 <= result.latency < 1


def test_calls_in_turn_do_not_overlap_if_the_process_pauses_while_one_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay answers a call from the record only if it began before the fork ended."""
    shift, pause = 0.0, 0.0
    real = time.monotonic

    def paused() -> float:
        nonlocal shift, pause
        reading = real() + shift
        shift, pause = shift + pause, 0.0
        return reading

    with cotune.trace(tmp_path) as trace:
        monkeypatch.setattr(time, "monotonic", paused)
        for seconds in (10.0, 0.0):
            pause = seconds
            call: Any = open_call(lambda: {"messages": [{"role": "user", "content": "x"}]})
            call.finish(answer("y"))
        monkeypatch.undo()
        trace.reward(1.0)
    with SqliteStore.open(tmp_path, read_only=True) as store:
        [episode] = store.episodes()
        first, second = store.calls(episode.id)
    assert first.latency >= 10
    assert first.started + first.latency <= second.started


def test_a_negative_latency_of_another_recorder_is_read_as_none(tmp_path: Path) -> None:
    with SqliteStore.open(tmp_path) as store:
        store.write([
            CallRecord(id="c", episode="e", role="r", step=0, turn=0, started=5.0, latency=-2.0),
            Episode(id="e", task=Task(id="t", input=1), workflow="w", started=5.0, latency=-2.0),
        ])  # fmt: skip
        store.flush()
        assert [(call.started, call.latency) for call in store.calls("e")] == [(5.0, 0.0)]
        assert store.episode("e").latency == 0.0
        assert store.rows("SELECT min(latency) FROM calls UNION SELECT min(latency) FROM episodes") == [(0.0,)]
        assert store.health.unreadable == 0
