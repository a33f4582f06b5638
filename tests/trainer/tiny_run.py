"""Runs of the tiny application by `cotune train` in a process of their own, and what their records say afterwards."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from cotune.storage.metrics_file import read_metrics
from cotune.storage.sqlite_store import SqliteStore
from tests.trainer.forked import Command
from tests.trainer.tiny_app import TASKS

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "OPENAI_BASE_URL": "http://127.0.0.1:9/v1",
    "SAMPLER_IN_THREAD": "1",
}
GONE = 180.0
"""Seconds after which no process of a killed run may be left. Ray's own agents try for a minute to tell a driver that
is gone that their raylet is gone."""


def new_run(base: Path, run: Path, steps: int, *more: str) -> list[str]:
    """The words after `cotune train` that start a run; its tasks are written beside it."""
    tasks = run.with_suffix(".jsonl")
    tasks.write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    words = ["tests.trainer.worker_app:solve", "--tasks", str(tasks), "--model", str(base), "--out", str(run)]
    words += ["--policies", "full", "--steps", str(steps), "--tasks-per-step", "3", "--lr", "5e-3"]
    return [*words, *more]


def on_cluster(settings: Mapping[str, object]) -> list[str]:
    """Options for fields of the `[cluster]` table."""
    return [f"--set=cluster.{name}={json.dumps(value)}" for name, value in settings.items()]


def launch(words: Sequence[str], run: Path, environment: Mapping[str, str] = ENVIRONMENT) -> Command:
    """Start `cotune train`; what it says goes to the end of `log_of(run)`."""
    return Command(["train", *words], run.parent, environment, log_of(run))


def log_of(run: Path) -> Path:
    return run.with_suffix(".log")


def hears(run: Path, words: str, seconds: float = 120.0) -> bool:
    """Whether a run says this within so many seconds: the witness of a driver's end speaks after it."""
    deadline = time.monotonic() + seconds
    while words not in log_of(run).read_text():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


class Audit(NamedTuple):
    """What records and metrics of a run say of its `steps`."""

    groups_lost: int
    trained_twice: int
    stale_trained: int
    """Rows trained on with another version than their step's."""


def audit(run: Path, steps: int) -> Audit:
    """Check the records of a run that has made so many steps against its metrics."""
    lines = list(read_metrics(run))
    store = SqliteStore.open(run / "records.db")
    try:
        consumed = Counter(store.consumed().values())
    finally:
        store.close()
    numbers = [line["step"] for line in lines]
    missing = sum(max(0, line["groups"] - consumed[line["step"]]) for line in lines) + (steps - len(set(numbers)))
    missing += sum(line["rows"] + sum(line["left_out"].values()) != line["candidates"] for line in lines)
    twice = len(numbers) - len(set(numbers)) + sum(max(0, consumed[ln["step"]] - ln["groups"]) for ln in lines)
    twice += sum(count for step, count in consumed.items() if step not in numbers)
    stale = sum(count for line in lines for lag, count in line["staleness"].items() if lag != "0")
    return Audit(missing, twice, stale)
