"""Runs that start from the policies of another run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from cotune.adapters.export import export_run, latest_policies
from cotune.errors import ConfigError
from tests.trainer.conftest import Trainer
from tests.trainer.records.records import traced
from tests.trainer.tiny_app import TASKS, application, ask, build_base, converse, letters


@pytest.fixture(scope="module")
def taught(module_trainer: Trainer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    records = str(traced(tmp_path_factory.mktemp("records") / "traced"))
    module_trainer(application(converse), None, to="sft", recipe="sft", records=records, steps=2, tasks_per_step=6)
    return module_trainer.folder / "sft"


def first_weights(run: Path, number: int) -> dict[str, Any]:
    return dict(load_file(run / f"checkpoints/step-000000/{number}.safetensors"))


def same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("exported", [False, True])
def test_a_reinforcement_run_starts_from_what_was_learned(
    trainer: Trainer, taught: Path, tmp_path: Path, exported: bool
) -> None:
    source = taught
    if exported:
        source = tmp_path / "export"
        export_run(taught, source)
    summary = trainer(application(converse, first=letters, second=letters), init=str(source), steps=1)
    first, second = latest_policies(taught)
    assert same(first_weights(tmp_path / "run", 0), first.weights) and any(w.any() for w in first.weights.values())
    assert same(first_weights(tmp_path / "run", 1), second.weights)
    assert f"first starts from first@2 of {source}" in trainer.said
    assert summary.versions == {"first": 2, "second": 2}
    versions = json.loads((tmp_path / "run/checkpoints/step-000000/checkpoint.json").read_text())["versions"]
    assert versions == {"first": 1, "second": 1}
    assert trainer.metrics()[0]["staleness"].keys() == {"0"}
    assert export_run(tmp_path / "run", tmp_path / "later").models == {"first": ("m",), "second": ("m",)}


def test_its_resumption_does_not_need_the_other_run(trainer: Trainer, taught: Path, tmp_path: Path) -> None:
    copy = tmp_path / "export"
    export_run(taught, copy)
    app = application(converse, first=letters, second=letters)
    trainer(app, init=str(copy), steps=1)
    (copy / "roles.json").unlink()
    assert trainer.resume(app, steps=2).finished
    assert "starts from" not in trainer.said


def test_a_preference_run_holds_policies_to_where_they_start(trainer: Trainer, taught: Path, tmp_path: Path) -> None:
    trainer(application(converse, first=letters, second=letters), TASKS, to="tree", steps=1)
    records = {"recipe": "dpo", "records": str(tmp_path / "tree"), "tasks_per_step": 3}
    trainer(application(converse), None, init=str(taught), steps=1, **records)
    assert [line["policies"]["first"]["margin"] for line in trainer.metrics()] == [0.0]
    assert same(first_weights(tmp_path / "run", 0), latest_policies(taught)[0].weights)
    noted = json.loads((tmp_path / "run/start.json").read_text())
    assert trainer.resume(application(converse), None, steps=2).finished
    assert len(noted) > 4 and json.loads((tmp_path / "run/start.json").read_text()) == noted


def test_a_policy_that_the_other_run_lacks_starts_untrained(trainer: Trainer, taught: Path) -> None:
    trainer(application(first_and_third, first=letters, third=letters), init=str(taught), steps=1)
    assert "first starts from first@2" in trainer.said
    assert f"third starts untrained: {taught} has no policy of third" in trainer.said
    with pytest.raises(ConfigError, match=r"init = .*has trained no role of this run.*: first, second"):
        trainer(application(only_third, third=letters), init=str(taught), steps=1, to="third")


async def only_third(task: Any) -> dict[str, float]:
    await ask("third", "say b")
    return {"team": 1.0}


async def first_and_third(task: Any) -> dict[str, float]:
    await ask("first", "say a")
    return await only_third(task)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policies": "shared"}, "has several policies .first, second. for first, second, which share one here"),
        ({"policies": "full"}, "has first in another shape .lora, rank 16, .*than first has here .full."),
        ({"lora": {"rank": 8}}, "has first in another shape .lora, rank 16, .*than first has here .lora, rank 8"),
        ({"init": "nothing"}, "init = .*nothing' is neither a run with a checkpoint nor an export"),
    ],
)
def test_what_does_not_fit_is_named(trainer: Trainer, taught: Path, settings: dict[str, Any], message: str) -> None:
    records = str(next(taught.parent.parent.glob("records*/traced")))
    settings = {"init": str(taught), "recipe": "sft", "records": records, **settings}
    with pytest.raises(ConfigError, match=message):
        trainer(application(converse), None, **settings)


def test_another_base_model_is_refused(trainer: Trainer, taught: Path, tmp_path: Path) -> None:
    other = build_base(tmp_path / "other", context=128)
    with pytest.raises(ConfigError, match="on another base model: the one of first has another config"):
        trainer(application(converse, first=letters), init=str(taught), steps=1, model=str(other))
