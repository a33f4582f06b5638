"""The line of a step, outside of a terminal."""

from __future__ import annotations

import io
import time
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from cotune.reading.now import NOW, Now, read_now
from cotune.records.structs import Episode, Task
from cotune.storage.file_lock import FileLock
from cotune.storage.metrics_file import StepMetrics
from cotune.trainer.reporting.activity import Activity
from cotune.trainer.reporting.progress import Progress, episode_bar


@pytest.mark.parametrize(("took", "left"), [(29.9, "1:00"), (0.2, "0:00"), (62.0, "2:04"), (1800.0, "60:00")])
def test_the_time_left_is_whole_minutes_and_seconds(monkeypatch: pytest.MonkeyPatch, took: float, left: str) -> None:
    now = 0.0
    monkeypatch.setattr("cotune.trainer.reporting.activity.time.perf_counter", lambda: now)
    none: dict[str, float] = {}
    counts = dict.fromkeys(("step", "episodes", "failed", "calls", "candidates", "groups", "rows"), 0)
    done = StepMetrics(
        **counts, outcome=none, roles={}, policies={}, left_out={}, staleness={}, counters=none, lr_scale=1.0,
        seconds=none, tokens_per_s=0.0, updated=True,
    )  # fmt: skip
    heard = io.StringIO()
    progress = Progress(3, Console(file=heard, width=200))
    progress.begin(0)
    now = took
    progress.step(done)
    assert heard.getvalue().rstrip().endswith(f"|  {left} to go")


def test_without_a_terminal_a_line_now_and_then_says_how_far_episodes_are(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter((0.0, 59.0, 60.0, 60.0, 61.0, 135.0, 135.0))
    monkeypatch.setattr("cotune.trainer.reporting.progress.time.monotonic", lambda: next(now))
    heard = io.StringIO()
    with episode_bar(Console(file=heard, width=80), 107, "trained") as advance:
        for _ in range(4):
            advance(Episode(id="E1", task=Task(id="a", input="x"), workflow="w"))
    assert heard.getvalue() == "trained: 2 of 107\ntrained: 4 of 107\n"


def test_without_a_terminal_a_long_step_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotune.trainer.reporting.progress.SILENCE", 0.2)
    heard = io.StringIO()
    with Progress(3, Console(file=heard, width=200)) as progress:
        progress.begin(1)
        with progress.activity.phase("rollout"):
            progress.rollout(4)
            progress.activity.advance("rollout")
            until = time.monotonic() + 30
            while "\n" not in heard.getvalue() and time.monotonic() < until:
                time.sleep(0.02)
    said = heard.getvalue()
    assert said.splitlines()[0] == "step 2/3  rollout, 1 of 4 episodes"
    time.sleep(0.4)
    assert heard.getvalue() == said, "it is over"


def test_phases_add_up_and_a_file_says_what_the_run_is_doing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("cotune.trainer.reporting.activity.time.perf_counter", lambda: now)
    activity = Activity(4, tmp_path)

    def told() -> Now:
        return msgspec.json.decode((tmp_path / NOW).read_bytes(), type=Now)

    with activity.phase("load"):
        now = 3.0
        with activity.phase("look"):
            now = 5.0
            assert (told().text, told().step, told().left) == ("look at the application", 0, None)
        now = 6.0
    assert activity.seconds == {"load": 4.0, "look": 2.0}
    activity.begin(0)
    now = 16.0
    assert activity.step(1) == 30.0
    with activity.phase("rollout"):
        activity.count("rollout", 2)
        activity.advance("rollout")
        activity.advance("rollout")
        now = 20.0
        with activity.phase("update", "writer"):
            assert (told().text, told().step, told().left) == ("update of writer", 2, 26.0)
            assert told().remaining(told().written + 20) == 6.0
            activity.count("rollout", 64)
            assert told().text == "update of writer", "rollouts of later steps go on meanwhile"
        assert told().text == "rollout, 0 of 64 episodes"
    assert read_now(tmp_path) is None, "no process holds the run"
    lock = FileLock(tmp_path / "lock", "The run")
    found = read_now(tmp_path)
    assert found is not None and found.steps == 4
    lock.release()
    activity.close()
    assert not (tmp_path / NOW).exists()
