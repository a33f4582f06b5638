"""The ablation: its runs and rows, its table, and a small one from the command to the table."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from cotune.errors import ConfigError
from cotune.trainer.evaluation.statistics import paired_difference
from examples.ablation import __main__ as command
from examples.ablation import plan_path
from examples.ablation.plan import Ablation, Row, merged, read_ablation, rows, trainings
from examples.ablation.table import Result, lines, markdown

TEAM = "examples.ablation.plan_path:team"
ALONE = {"navigator": "examples.ablation.plan_path:alone_navigator"}


def ablation(**fields: Any) -> Ablation:
    whole = {"workflow": TEAM, "tasks": "t.jsonl", "held_out": "h.jsonl", "train": {"steps": 1, "learner": {"lr": 1.0}}}
    return Ablation(**{**whole, "layouts": {"shared": {}, "full": {"learner": {"lr": 0.5}}}, **fields})


def test_a_layout_replaces_only_the_settings_that_it_names() -> None:
    runs = {run.name: run for run in trainings(ablation(alone=ALONE), Path("folder"))}
    assert list(runs) == ["alone_navigator", "team_shared", "team_full"]
    assert runs["team_shared"].settings == {"steps": 1, "learner": {"lr": 1.0}, "policies": "shared"}
    assert runs["team_full"].settings == {"steps": 1, "learner": {"lr": 0.5}, "policies": "full"}
    assert runs["alone_navigator"].settings["policies"] == "lora"
    assert merged({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}}) == {"a": {"b": 3, "c": 2}}


def test_every_row_is_compared_with_its_own_application_untrained() -> None:
    table = rows(ablation(alone=ALONE))
    assert [(row.name, row.before, row.mode) for row in table] == [
        ("untrained", "", "base"),
        ("alone_navigator_untrained", "", "base"),
        ("alone_navigator", "alone_navigator_untrained", "trained"),
        ("alone_together", "untrained", "trained"),
        ("team_shared", "untrained", "trained"),
        ("team_full", "untrained", "trained"),
        ("team_full_swapped", "untrained", "swapped"),
    ]
    workflows = {row.name: row.workflow for row in table}
    assert workflows["alone_navigator_untrained"] == workflows["alone_navigator"] == ALONE["navigator"]


def result(row: str, seed: int, values: list[float], figure: str = "success") -> Result:
    by_task = {f"task{number}": value for number, value in enumerate(values)}
    return Result(row=row, seed=seed, digest=f"{row}{seed}", figure=figure, by_task=by_task, calls=4.0, failed=1)


ROWS = [
    Row(name="untrained", title="untrained", workflow=TEAM, players={}),
    Row(name="trained", title="trained", workflow=TEAM, players={}, before="untrained"),
]


def test_gains_are_paired_by_seed_and_by_task() -> None:
    found = [
        result("untrained", 0, [0, 0, 1, 1]),
        result("trained", 0, [1, 0, 1, 1]),
        result("untrained", 1, [0, 0, 0, 1]),
        result("trained", 1, [1, 1, 1, 1]),
    ]
    untrained, trained = lines(ROWS, {(one.row, one.seed): one for one in found})
    assert untrained.gain_over_seeds is None
    assert trained.seeds == {0: 0.75, 1: 1.0} and trained.failed == 2
    over_seeds, over_tasks = trained.gain_over_seeds, trained.gain_over_tasks
    assert over_seeds is not None and over_tasks is not None
    # Gains of 0.25 and 0.75 by seed; of 1, 0.5, 0.5 and 0 by task.
    assert (over_seeds.mean, over_seeds.n) == (0.5, 2)
    assert (over_tasks.mean, over_tasks.n) == (0.5, 4)
    # Student's t with one degree of freedom is 12.7: two seeds say little.
    assert over_seeds.low == pytest.approx(0.5 - 12.706 * 0.25, abs=0.01)
    # The test of `cotune eval`: three tasks gained and none lost, which a coin would do in one of four cases.
    after = {"task0": 1.0, "task1": 0.5, "task2": 1.0, "task3": 1.0}
    before = {"task0": 0.0, "task1": 0.0, "task2": 0.5, "task3": 1.0}
    assert over_tasks == paired_difference(after, before)
    assert over_tasks.low is not None and over_tasks.low <= 0
    assert "| trained | 0.875 | 0.750, 1.000 | +0.500 (-2.677 to +3.677) |" in markdown([untrained, trained])


def test_one_seed_has_no_interval_over_seeds_and_another_figure_no_gain() -> None:
    one = {("untrained", 0): result("untrained", 0, [0, 0]), ("trained", 0): result("trained", 0, [1, 0])}
    assert "+0.500 (one seed)" in markdown(lines(ROWS, one))
    other = {**one, ("trained", 0): result("trained", 0, [1, 0], figure="reward")}
    assert lines(ROWS, other)[1].gain_over_seeds is None


@pytest.mark.parametrize(
    ("text", "fault"),
    [("workflow = 1", "is no configuration of an ablation"), ("", "is no configuration of an ablation")],
)
def test_a_wrong_configuration_is_refused(text: str, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "ablation.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=fault):
        read_ablation(path)


def test_tasks_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "ablation.toml"
    path.write_text(f'workflow = "{TEAM}"\ntasks = "t.jsonl"\nheld_out = "h.jsonl"\n[train]\n[layouts.lora]\n')
    with pytest.raises(ConfigError, match=r"t\.jsonl' does not exist"):
        read_ablation(path)


SMALL = f"""
workflow = "{TEAM}"
tasks = "tasks.jsonl"
held_out = "held_out.jsonl"
seeds = [0]
[alone]
navigator = "examples.ablation.plan_path:alone_navigator"
[train]
model = "MODEL"
steps = 1
tasks_per_step = 2
[train.plan]
k = 2
[train.sampling]
max_tokens = 4
[layouts.lora]
"""


@pytest.mark.timeout(300)
def test_a_small_ablation_from_the_command_to_the_table(
    in_thread: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--warm-up", "2", "--tasks", "4", "--held-out", "3"]
    monkeypatch.setattr(sys, "argv", ["plan_path", "--out", str(tmp_path), *sizes])
    plan_path.main()
    config = tmp_path / "ablation.toml"
    config.write_text(SMALL.replace("MODEL", str(tmp_path / "base")))
    monkeypatch.setattr(sys, "argv", ["ablation", str(config), "--out", str(tmp_path / "out"), "--yes"])

    assert command.main() == 0
    printed = capsys.readouterr()
    assert "1 seeds x 2 runs: 4 episodes of training" in printed.err
    table = json.loads(printed.out.splitlines()[-1])
    assert [line["row"] for line in table] == [row.name for row in rows(read_ablation(config))]
    assert (tmp_path / "out" / "ablation.md").read_text() in printed.out

    # Again: nothing is trained or evaluated a second time.
    monkeypatch.setattr(command, "train_once", lambda *args: pytest.fail("trained again"))
    assert command.main() == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == table


def test_another_configuration_in_the_same_folder_is_another_ablation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs and results are those of their settings, tasks, base model and seed."""
    calls: list[tuple[str, str]] = []

    def train(workflow: str, tasks: Path, settings: dict[str, Any], *, out: Path, console: Any) -> Any:
        out.mkdir(parents=True)
        calls.append(("train", out.name))
        return SimpleNamespace(finished=True)

    def evaluated(row: Row, players: Any, held_out: Path, seed: int, digest: str) -> Result:
        calls.append(("evaluate", row.name))
        return msgspec.structs.replace(result(row.name, seed, [1.0]), digest=digest)

    monkeypatch.setattr(command.cotune, "train", train)
    monkeypatch.setattr(command.cotune, "resume", lambda *args, **options: pytest.fail("resumed a finished run"))
    monkeypatch.setattr(command, "evaluated", evaluated)
    base = tmp_path / "base"
    base.mkdir()
    for file in ("tasks.jsonl", "held_out.jsonl", "base/config.json"):
        (tmp_path / file).write_text("{}")
    save_file({"weight": torch.zeros(1)}, base / "model.safetensors")
    config = tmp_path / "ablation.toml"

    def run(text: str) -> list[str]:
        calls.clear()
        config.write_text(text)
        command.run(read_ablation(config), tmp_path, tmp_path / "out")
        return [what for what, _ in calls]

    small = SMALL.replace("MODEL", "base")
    first = run(small)
    assert first.count("train") == 2 and first.count("evaluate") == len(rows(read_ablation(config)))
    assert run(small) == []
    assert "train" in run(small.replace("steps = 1", "steps = 2"))
    assert run(small) == [], "the results of the first configuration are still there"
    save_file({"weight": torch.ones(1)}, base / "model.safetensors")
    assert "train" in run(small), "a base model built again is another one"
    (tmp_path / "held_out.jsonl").write_text("{} ")
    assert set(run(small)) == {"evaluate"}, "other held-out tasks need no training"


def test_the_question_before_it_begins_shows_its_choices(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    questions: list[str] = []
    monkeypatch.setattr("builtins.input", lambda question: (questions.append(question), "y")[1])
    assert command.agreed()
    assert questions == ["Begin? [y/N] "]
    monkeypatch.setattr("builtins.input", lambda question: "")
    assert not command.agreed()


def test_the_model_is_found_beside_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "configs"
    (folder / "base").mkdir(parents=True)
    for file in ("tasks.jsonl", "held_out.jsonl"):
        (folder / file).write_text("{}")
    monkeypatch.chdir(tmp_path)
    config = folder / "ablation.toml"
    config.write_text(SMALL.replace("MODEL", "base"))
    assert read_ablation(config).train["model"] == str(folder / "base")
    config.write_text(SMALL.replace("MODEL", "Qwen/Qwen3-1.7B"))
    assert read_ablation(config).train["model"] == "Qwen/Qwen3-1.7B"
