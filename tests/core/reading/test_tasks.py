"""Tasks by difficulty, and how often an adaptive pool draws each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cotune.reading import tasks as module
from cotune.reading.run import OpenedRun
from cotune.reading.tasks import tasks
from cotune.records.structs import Episode, RewardRecord, Task
from cotune.storage.sqlite_store import SqliteStore


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose tasks have succeeded in 1, 0 and 1 of 2 episodes; its checkpoint knows the first two."""
    with SqliteStore.open(tmp_path) as store:
        for number, (task, value) in enumerate([("a", 1.0), ("b", 0.0), ("c", 1.0), ("c", 0.0)]):
            fields = {"workflow": "w", "phase": "train", "training_step": 0, "started": 1.0, "latency": 1.0}
            store.write([Episode(id=f"E{number}", task=Task(id=task, input={}), **fields)])
            store.write([RewardRecord(f"E{number}", "team", value)])
    config = {"curriculum": {"pool": "adaptive"}}
    (tmp_path / "run.json").write_text(json.dumps({"id": "r", "config": config}))
    checkpoint = tmp_path / "checkpoints" / "step-000001"
    checkpoint.mkdir(parents=True)
    (checkpoint.parent / "latest").write_text(checkpoint.name)
    policy = {"name": "p", "kind": "lora", "version": 1, "roles": ["one"]}
    (checkpoint / "policies.json").write_text(json.dumps([policy]))
    # Of two rewards each: a had none that differed, b (say, by format) had a variance of 0.25.
    known = {"a": [1.0, {"one": [2.0, 0.0]}], "b": [0.0, {"one": [2.0, 0.25], "untrained": [2.0, 9.0]}]}
    (checkpoint / "checkpoint.json").write_text(json.dumps({"steps": 1, "run": "r", "tasks": known}))
    return tmp_path


def test_tasks_have_the_share_that_an_adaptive_pool_gives_them(run: Path) -> None:
    opened = OpenedRun(run)
    page = tasks(opened, "train")
    # The average variance is 0.125 and weighs as much as two rewards: 0.0625, 0.1875 and, untried, 0.125.
    expected = {name: 0.1 + 0.9 * 3 * weight / 6 for name, weight in (("a", 1), ("b", 3), ("c", 2))}
    assert {row.id: row.draws for row in page.rows} == pytest.approx(expected)
    assert page.adaptive and [row.id for row in page.rows] == ["a", "b", "c"]
    assert [row.id for row in tasks(opened, "train", order="hardest").rows] == ["b", "c", "a"]
    assert [row.id for row in tasks(opened, "train", order="most").rows] == ["b", "c", "a"]
    assert [row.draws for row in tasks(opened, "eval").rows] == []
    opened.close()


def test_pages_go_on_in_their_order(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAGE", 2)
    opened = OpenedRun(run)
    first = tasks(opened, "train", order="hardest")
    assert ([row.id for row in first.rows], first.after) == (["b", "c"], "c")
    assert [row.id for row in tasks(opened, "train", after=first.after, order="hardest").rows] == ["a"]
    opened.close()


def test_pages_by_id_go_on_after_a_task_that_has_left_its_kind(run: Path) -> None:
    """As a task does that is solved for the first time while somebody looks at those that never were."""
    opened = OpenedRun(run)
    assert [row.id for row in tasks(opened, "train", "never", after="a").rows] == ["b"]
    assert [row.id for row in tasks(opened, "train", "never", after="ba").rows] == []
    opened.close()


def test_a_run_without_a_checkpoint_has_no_shares(run: Path) -> None:
    (run / "checkpoints" / "latest").unlink()
    opened = OpenedRun(run)
    assert {row.draws for row in tasks(opened, "train").rows} == {None}
    opened.close()
