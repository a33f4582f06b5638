"""The files of a run folder, read by name and type without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cotune.config.policy import PolicyConfig
from cotune.config.train import TrainConfig
from cotune.errors import RunError
from cotune.storage.checkpoints import newest_checkpoint, read_best, read_policies, steps_of
from cotune.storage.metrics_file import read_metrics
from cotune.storage.run_layout import (
    RunDescription,
    RunLayout,
    read_config,
    read_end,
    read_run,
    read_run_json,
)


def run(folder: Path, described: Any) -> Path:
    (folder / "run.json").write_text(described if isinstance(described, str) else json.dumps(described))
    return folder


def test_a_format_of_tool_calls_is_that_of_the_base_however_it_is_written() -> None:
    config = TrainConfig(
        policy=(
            PolicyConfig(name="a", roles=("a",), model="./base", tool_format="mistral"),
            PolicyConfig(name="b", roles=("b",), model="base"),
            PolicyConfig(name="c", roles=("c",), model="other"),
        )
    )
    assert [config.tool_format_of(name) for name in "abc"] == ["mistral", "mistral", "auto"]


def test_what_is_read_again_is_typed_and_the_rest_is_kept(tmp_path: Path) -> None:
    config = {"steps": 7, "plan": {"kind": "tree", "k": 4}, "learner": {"mini_batch": 8, "lr": 1.0}, "tags": []}
    described = {"model": "m", "versions": {"python": "3.11"}, "config": config}
    found = read_run(run(tmp_path, described))
    assert (found.model, found.config.steps, found.config.plan.kind, found.config.rewards.team_weight) == (
        "m",
        7,
        "tree",
        None,
    )
    assert found.config.learner.mini_batch == 8
    assert read_run_json(tmp_path) == described


def test_a_run_whose_settings_have_earlier_names_is_refused(tmp_path: Path) -> None:
    folder = run(tmp_path, {"model": "m", "config": {"steps": 7, "overrides": {"clip_high": 0.28}}})
    with pytest.raises(RunError, match=r"run.json was written by an earlier cotune, .* Read it with cotune 0.1.0 at"):
        read_run(folder)


def test_a_run_of_no_settings_has_the_defaults(tmp_path: Path) -> None:
    assert read_run(run(tmp_path, {})) == RunDescription(config=TrainConfig())


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ("{", "run.json is broken: Expecting property name"),
        ("[]", "run.json is broken: Expected `object`, got `array`"),
        ({"config": {"steps": "ten"}}, "run.json is broken: config.steps: Expected `int`, got `str`"),
        ({"config": {"plan": {"kind": "bush"}}}, "run.json is broken: config.plan.kind: Invalid enum value 'bush'"),
    ],
)
def test_a_broken_description_is_named_with_its_field(tmp_path: Path, described: Any, message: str) -> None:
    with pytest.raises(RunError) as caught:
        read_run(run(tmp_path, described))
    assert message in caught.value.cause


def test_a_folder_without_a_run_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"holds no run: there is no run\.json"):
        read_run(tmp_path)


def test_the_newest_checkpoint_is_the_one_that_latest_names(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    assert newest_checkpoint(layout.checkpoints) is None
    layout.checkpoints.mkdir()
    layout.latest.write_text("../../step-000012\n")
    assert newest_checkpoint(layout.checkpoints) == layout.checkpoints / "step-000012"
    assert steps_of(layout.checkpoints / "step-000012") == 12


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        ("{", "is broken: Expecting"),
        (
            '[{"name": "shared", "kind": "lora", "version": "1", "roles": []}]',
            r"\[0\].version: Expected `int`, got `str`",
        ),
    ],
)
def test_policies_that_cannot_be_read_are_said_so(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "policies.json").write_text(content)
    with pytest.raises(RunError, match=message):
        read_policies(tmp_path)


@pytest.mark.parametrize("text", ["\0", "step-000012\0", ""])
def test_a_latest_that_names_no_checkpoint_is_quoted(tmp_path: Path, text: str) -> None:
    layout = RunLayout(tmp_path)
    layout.checkpoints.mkdir()
    layout.latest.write_text(text)
    with pytest.raises(RunError, match=r"checkpoints/latest names no checkpoint: '"):
        newest_checkpoint(layout.checkpoints)


@pytest.mark.parametrize(
    ("described", "fault"),
    [
        ({"config": {"on_failure": 1e308}}, "config.on_failure"),
        ({"config": [1]}, "config"),
        ({"config": {}, "tasks": 5}, "tasks"),
    ],
)
def test_a_field_of_run_json_that_is_odd_is_named(tmp_path: Path, described: Any, fault: str) -> None:
    with pytest.raises(RunError, match=rf"run\.json is broken: .*({fault})"):
        read_run_json(run(tmp_path, described))


def test_a_line_of_metrics_with_an_odd_field_is_left_out_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = {
        "step": 0,
        "outcome": {},
        "left_out": {},
        "calls": 1,
        "candidates": 1,
        "groups": 1,
        "seconds": {"update": 1.0},
    }
    odd = {**whole, "step": 1, "seconds": {"update": [1]}}
    RunLayout(tmp_path).metrics.write_text(f"{json.dumps(whole)}\n{json.dumps(odd)}\n")
    assert [line["step"] for line in read_metrics(tmp_path)] == [0]
    assert "metrics.jsonl: 1 broken line is left out (line 2: seconds" in caplog.text


def test_a_run_json_without_a_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"run\.json is broken: it has no `config`"):
        read_config(run(tmp_path, {}))
    with pytest.raises(RunError, match="abc is not the name of a checkpoint"):
        steps_of(tmp_path / "abc")


def test_an_end_that_is_nested_too_deeply_is_none(tmp_path: Path) -> None:
    deep = "[" * 200_000 + "]" * 200_000
    (tmp_path / "end.json").write_text(f'{{"kind": "failed", "cause": "c", "more": {deep}}}')
    assert read_end(tmp_path) is None


@pytest.mark.parametrize("name", ["", "../..", "step-", "step-000002/..", "step-000002\n", "\0"])
def test_a_best_checkpoint_is_a_step_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "best.json").write_text(json.dumps({"p": {"checkpoint": name, "figure": 0.5}}))
    with pytest.raises(RunError, match=r"best\.json is broken"):
        read_best(tmp_path)
