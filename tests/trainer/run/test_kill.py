"""A run that is killed again and again, also while it writes checkpoints, loses no finished group and trains none
twice."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from cotune.algorithms.collect import collect
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.metrics_file import read_metrics
from cotune.storage.sqlite_store import SqliteStore
from cotune.trainer.run.checkpoint import load_checkpoint
from tests.trainer.forked import Command
from tests.trainer.tiny_app import TASKS
from tests.trainer.tiny_run import ENVIRONMENT

pytestmark = pytest.mark.slow

K = 4
APP = """
import time
from cotune.trainer.run import checkpoint
from tests.trainer.tiny_app import application, letters

hashed = checkpoint.write_hashes
checkpoint.write_hashes = lambda folder: (time.sleep(0.05), hashed(folder))[1]  # so long that its writing is seen
solve = application(first=letters, second=letters)
"""


class Process:
    """`cotune train` in a process of its own."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.log = folder / "log"
        self.log.write_text("")
        self.process = Command(["train", *arguments], folder, ENVIRONMENT, self.log)

    def killed_when(self, moment: Callable[[], bool]) -> None:
        """Wait for the moment, then SIGKILL."""
        while not moment():
            try:
                self.process.wait(0.003)
            except subprocess.TimeoutExpired:
                continue
            raise AssertionError(f"ended before it could be killed:\n{self.said()}")
        self.process.kill()
        assert self.process.wait() == -signal.SIGKILL

    def finished(self) -> None:
        assert self.process.wait() == 0, self.said()

    def said(self) -> str:
        return self.log.read_text()


def steps_done(run: Path) -> int:
    return sum(1 for _ in read_metrics(run))


def writing_checkpoint(run: Path, after: int) -> Callable[[], bool]:
    """While a checkpoint is being written, after so many steps."""
    return lambda: steps_done(run) >= after and any((run / "checkpoints").glob(".*.partial"))


def some_time_after(run: Path, after: int, seconds: float) -> Callable[[], bool]:
    """So many seconds after a step was seen to be done."""
    seen: list[float] = []

    def moment() -> bool:
        if not seen and steps_done(run) >= after:
            seen.append(time.perf_counter())
        return bool(seen) and time.perf_counter() - seen[0] >= seconds

    return moment


def moments_of(run: Path, kills: int, chance: random.Random) -> list[Callable[[], bool]]:
    """Every other kill strikes while a checkpoint is written; a new step is done between two pairs of kills."""
    return [
        writing_checkpoint(run, 1 + i) if i % 2 == 0 else some_time_after(run, 2 + i, chance.uniform(0.0, 0.3))
        for i in range(kills)
    ]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", [2, pytest.param(46, marks=[pytest.mark.long, pytest.mark.timeout(3600)])])
def test_killed_and_resumed(
    tiny_base: Path, tmp_path: Path, record_property: Callable[[str, object], None], kills: int
) -> None:
    run, steps = tmp_path / "run", kills + 3
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    seed = random.randrange(10**6)
    record_property("seed", seed)
    first, *others = moments_of(run, kills, random.Random(seed))
    settings = ["concurrency=1"]
    settings.append("sampling.repeatable=true")  # which is cold after a kill, and rounds otherwise when it is warm
    begin = [
        *("app.py:solve", "--tasks", "tasks.jsonl", "--model", str(tiny_base), "--out", "run", "--lr", "3e-3"),
        *("--steps", str(steps), "--tasks-per-step", "3", "-k", str(K)),
        *(word for setting in settings for word in ("--set", setting)),
    ]
    Process(tmp_path, *begin).killed_when(first)
    for moment in others:
        Process(tmp_path, "--resume", "run").killed_when(moment)
    Process(tmp_path, "--resume", "run").finished()
    begin[begin.index("run")] = "whole"
    Process(tmp_path, *begin).finished()

    assert_every_group_trained_once(run, steps)
    assert_same_weights(run, tmp_path / "whole")


def assert_same_weights(run: Path, other: Path) -> None:
    """Bit for bit, with the optimizers' states and the order of rows. Each process counts the steps that it checks."""
    (_, one), (_, two) = (load_checkpoint(folder / "checkpoints") for folder in (run, other))
    files = sorted(path.relative_to(one) for path in one.rglob("*.safetensors"))
    assert files
    for file in files:
        ours, theirs = load_file(one / file), load_file(two / file)
        assert ours.keys() == theirs.keys()
        assert [name for name in ours if name != "steps" and not ours[name].equal(theirs[name])] == [], file


def assert_every_group_trained_once(run: Path, steps: int) -> None:
    checkpoint, _ = load_checkpoint(run / "checkpoints")
    lines = list(read_metrics(run))
    assert checkpoint.steps == steps
    assert [line["step"] for line in lines] == list(range(steps))
    assert not list(run.rglob("*.partial"))
    for name, version in checkpoint.versions.items():
        assert version == sum(name in line["policies"] for line in lines)

    store = SqliteStore.open(run, read_only=True)
    assert sum(line["groups"] for line in lines) == len(store.consumed())

    for line in lines:
        episodes = list(store.episodes(EpisodeFilters(phase="train", training_step=line["step"])))
        assert Counter(episode.task.id for episode in episodes) == {"a": 1, "b": 1, "c": 1}
        samples = collect(store, episodes).samples
        assert len(samples) == line["candidates"] == 3 * 2 * K
        assert line["rows"] + sum(line["left_out"].values()) == line["candidates"]
        groups = {group for group, step in store.consumed().items() if step == line["step"]}
        assert groups <= {sample.call for sample in samples}
        assert line["groups"] == len(groups)
        assert line["groups"] * K == line["rows"] + line["left_out"].get("zero_advantage", 0)
