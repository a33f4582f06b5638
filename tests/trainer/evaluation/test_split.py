"""Tasks that a run holds out by itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cotune.config.train import TrainConfig
from cotune.errors import ConfigError
from cotune.reading.evaluations import read_evaluations
from cotune.records.structs import Task
from cotune.records.tasks import as_tasks, load_tasks
from cotune.storage.run_layout import read_run_json
from cotune.storage.sqlite_store import SqliteStore
from cotune.trainer.config.load import convert
from cotune.trainer.evaluation.split import LEAST, MOST, Split, overlap, split_again, split_tasks, write_split
from cotune.trainer.evaluation.verdict import tasks_for_gain, what_tasks_show
from tests.trainer.conftest import Trainer
from tests.trainer.tiny_app import application, letters


def config(**more: Any) -> TrainConfig:
    return convert({"model": "m", **more})


def tasks(count: int, **more: Any) -> list[Any]:
    return as_tasks([{"id": f"t{i}", "x": i, **more} for i in range(count)])


def ids(found: Any) -> list[str]:
    return [task.id for task in found]


@pytest.mark.parametrize(("count", "held_out"), [(47, 0), (48, 16), (100, 33), (153, 51), (5000, MOST)])
def test_a_third_is_held_out_from_forty_eight_tasks_on_and_fifty_one_at_most(count: int, held_out: int) -> None:
    split = split_tasks(tasks(count), config())
    assert (len(split.tasks), len(split.held_out)) == (count - held_out, held_out)
    assert sorted([*ids(split.tasks), *ids(split.held_out)]) == sorted(ids(tasks(count)))
    assert (f"held out: {held_out} of {count:,} tasks" in split.note) == bool(held_out)
    assert ("no task is held out: 47 tasks, and 48 different ones are needed" in split.note) == (held_out < LEAST)
    assert (what_tasks_show(held_out) in split.note) == bool(held_out)


def test_a_run_holds_out_as_many_tasks_as_show_thirty_points() -> None:
    assert tasks_for_gain(0.3) == MOST


def test_the_split_goes_by_ids_and_seed_and_a_resumed_run_keeps_it() -> None:
    one, other = split_tasks(tasks(200), config()), split_tasks(tasks(200)[::-1], config())
    assert (
        sorted(one.chosen_ids) == sorted(other.chosen_ids) != sorted(split_tasks(tasks(200), config(seed=1)).chosen_ids)
    )
    again = split_again(tasks(200), config(seed=1), {"held": {"held_out": list(one.chosen_ids)}})
    assert (ids(again.tasks), ids(again.held_out)) == (ids(one.tasks), ids(one.held_out))
    off = split_again(tasks(200), config(evaluation={"tasks": "none"}), {"held": {"held_out": list(one.chosen_ids)}})
    assert (ids(off.tasks), off.held_out) == (ids(one.tasks), [])


def test_none_turns_it_off_and_a_file_takes_its_place(tmp_path: Any) -> None:
    assert split_tasks(tasks(200), config(evaluation={"tasks": "none"})).held_out == []
    (tmp_path / "t.jsonl").write_text('{"id": "own", "x": 7}\n')
    split = split_tasks(tasks(200), config(evaluation={"tasks": str(tmp_path / "t.jsonl")}))
    assert (ids(split.held_out), len(split.tasks), split.chosen_ids) == (["own"], 200, ())
    assert list(overlap(split.tasks, split.held_out)) == [
        "1 of 1 held-out tasks are trained on too: success on them says little"
    ]


def test_tasks_with_one_input_stay_together_and_no_level_is_emptied() -> None:
    same = as_tasks([{"id": f"t{i}", "x": i // 2} for i in range(100)])
    split = split_tasks(same, config())
    assert len(split.held_out) == 32 and not list(overlap(split.tasks, split.held_out))
    repeated = as_tasks([{"id": f"t{i}", "x": 0} for i in range(100)])
    assert "100 tasks, and 48 different ones are needed" in split_tasks(repeated, config()).note
    levels = as_tasks([{"id": f"t{i}", "x": i, "hard": i % 60} for i in range(100)])
    split = split_tasks(levels, config(curriculum={"pool": "by:hard"}))
    assert len({task.input["hard"] for task in split.tasks}) == 60 and len(split.held_out) == 33


@pytest.mark.parametrize("evaluation", [{"keep_best": True}, {"patience": 2}])
def test_what_needs_held_out_tasks_is_refused_without_them(evaluation: Mapping[str, Any]) -> None:
    assert len(split_tasks(tasks(50), config(evaluation=evaluation)).held_out) == 16
    with pytest.raises(ConfigError, match=r"evaluation\.(keep_best|patience) = .*47 tasks, and 48 .*--eval-tasks FILE"):
        split_tasks(tasks(47), config(evaluation=evaluation))
    with pytest.raises(ConfigError, match=r"evaluation\.tasks = 'none'.*--eval-tasks FILE"):
        config(evaluation={**evaluation, "tasks": "none"})


def test_a_resumed_run_on_other_held_out_tasks_leaves_the_file_of_its_own_as_it_was(tmp_path: Path) -> None:
    split = split_tasks(tasks(200), config(seed=1))
    file = Path(write_split(tmp_path, split, print))
    before = file.read_bytes()
    (others := tmp_path / "others.jsonl").write_text(json.dumps({"id": "x", "n": 1}) + "\n")
    for given in ("none", str(others)):
        evaluated = config(evaluation={"tasks": given})
        again = split_again(tasks(200), evaluated, {"held": {"held_out": list(split.chosen_ids)}})
        assert not write_split(tmp_path, again, print)
        assert file.read_bytes() == before


def test_held_out_tasks_keep_their_ids_and_inputs_in_the_file_of_the_run(tmp_path: Path) -> None:
    """Tasks without an id have the number of their line: another one in the shorter file."""
    mixed = as_tasks(
        [{"x": i} if i % 3 == 0 else f"task {i}" if i % 3 == 1 else {"id": f"n{i}", "x": i} for i in range(90)]
    )
    split = split_tasks([*mixed, Task(id="own", input=["a"])], config())
    again = load_tasks(write_split(tmp_path, split, print))
    assert [(task.id, task.input) for task in again] == [(task.id, task.input) for task in split.held_out]
    assert {type(task.input) for task in again} == {dict, str}


def test_held_out_tasks_that_are_no_json_are_told_and_counted(tmp_path: Path) -> None:
    said: list[str] = []
    odd = as_tasks([{"id": f"t{i}", "x": object() if i % 2 else i} for i in range(60)])
    split = Split(tasks=odd, held_out=odd[:6], chosen_ids=ids(odd[:6]))
    assert write_split(tmp_path, split, said.append) == "" and not (tmp_path / "held_out.jsonl").exists()
    assert said == [
        "3 of 6 held-out tasks are not JSON (task t1: Encoding objects of type object is unsupported), so "
        f"{tmp_path / 'held_out.jsonl'} is not written; cotune eval needs a file of your own"
    ]


def test_a_run_never_trains_on_what_it_holds_out(trainer: Trainer) -> None:
    given = [{"id": f"t{i}", "letter": "abcdefghij"[i % 10] * (1 + i // 10)} for i in range(50)]
    summary = trainer(application(first=letters), given, steps=1, tasks_per_step=34, plan={"k": 2})
    run = trainer.folder / "run"
    own = read_run_json(run)["held"]["held_out"]
    assert f"held out: {len(own)} of 50 tasks" in " ".join(trainer.said.split()) and len(own) == 16
    assert summary.held_out == str(run / "held_out.jsonl") and ids(load_tasks(summary.held_out)) == own
    with SqliteStore.open(run, read_only=True) as store:
        trained = {task for (task,) in store.rows("SELECT task FROM episodes WHERE phase IN ('train', 'check')")}
        tried = {task for (task,) in store.rows("SELECT task FROM episodes WHERE phase = 'eval'")}
    assert trained == {task["id"] for task in given} - set(own) and tried == set(own)
    line = json.loads((run / "metrics.jsonl").read_text())
    assert line["held_out"]["episodes"] == 16 and "before training, held-out, single samples: reward" in trainer.said
    before, after = read_evaluations(run)
    assert (before.name, after.name) == ("in training, before the first step", "in training, after step 1")
    assert after.evaluations["base"].endings.keys() == after.evaluations["trained"].endings.keys() == set(own)
    found = summary.headline
    assert found.verdict == after.comparisons[0].verdict and found.changes[0].kind == "held_out"
    assert (found.changes[0].first.mean, found.changes[0].last.mean) == (
        line["held_out"]["base_reward"], line["held_out"]["reward"],
    )  # fmt: skip
    trainer.resume(application(first=letters), given, steps=2)
    assert trainer.said.count("before training") == 0 and len(read_evaluations(run)) == 3
