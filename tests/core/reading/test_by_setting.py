"""`cotune show FOLDER --by SETTING`: the figure of many runs by one of their settings, over seeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from cotune.cli.main import main
from cotune.intervals import Interval, student_quantile
from cotune.reading.by_setting import by_setting, interval_over_runs
from cotune.reading.evaluations import EvaluatedMode, EvaluationReport, step_file
from cotune.reading.find_runs import open_runs

SUCCESS = {"at_grpo": {0: 0.5, 1: 0.6, 2: 0.7}, "dr_mas": {0: 0.45, 1: 0.5, 2: 0.55}}


def make_run(folder: Path, seed: int, held_out: dict[str, float], **config: Any) -> None:
    folder.mkdir(parents=True)
    config = {"recipe": "", "steps": 1, "seed": seed, "learner": {"lr": 1e-4}, **config}
    (folder / "run.json").write_text(json.dumps({"model": "m", "tasks": "tasks.jsonl", "config": config}))
    line = {
        "step": 0, "episodes": 4, "failed": 0, "calls": 8, "candidates": 8, "groups": 2, "rows": 6,
        "path": "single samples", "outcome": {}, "roles": {}, "left_out": {}, "seconds": {"rollout": 1.0},
        "counters": {}, "held_out": held_out,
    }  # fmt: skip
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three seeds of each recipe. All start at 0.4."""
    for recipe, of_seed in SUCCESS.items():
        for seed, success in of_seed.items():
            run = tmp_path / "runs" / f"{recipe}-{seed}"
            make_run(run, seed, {"success": success, "success_n": 40.0}, recipe=recipe)
            modes = {"base": 0.4, "trained": success}
            report = EvaluationReport(
                evaluations={
                    label: EvaluatedMode(label=label, episodes=40, success=Interval(mean=mean, n=40))
                    for label, mean in modes.items()
                }
            )
            step_file(run, 1).parent.mkdir()
            step_file(run, 1).write_text(json.dumps(report.to_json()))
    return tmp_path / "runs"


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 9, 30, 31, 199])
def test_the_quantile_of_students_t(freedom: int) -> None:
    assert student_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-9)


def test_the_interval_is_that_of_student_over_runs() -> None:
    found = interval_over_runs([0.5, 0.6, 0.7])
    # t(2) = 4.302653, sd = 0.1: 4.302653 * 0.1 / sqrt(3) = 0.248414
    assert (found.mean, found.low, found.high, found.n) == (
        pytest.approx(0.6), pytest.approx(0.351586, abs=1e-6), pytest.approx(0.848414, abs=1e-6), 3,
    )  # fmt: skip
    assert interval_over_runs([0.5]) == Interval(mean=0.5, n=1)


def test_recipes_over_seeds(runs: Path) -> None:
    grouped = by_setting(open_runs([runs]), "recipe")
    assert (grouped.setting, grouped.percent, grouped.notes) == ("recipe", True, ())
    assert grouped.figure == "held-out success on tasks held out of tasks.jsonl"
    first, second = grouped.groups
    assert (first.value, second.value) == ("at_grpo", "dr_mas")
    assert [(run.name, run.seed, run.last) for run in second.runs] == [
        ("dr_mas-0", 0, 0.45), ("dr_mas-1", 1, 0.5), ("dr_mas-2", 2, 0.55),
    ]  # fmt: skip
    assert first.last.mean == pytest.approx(0.6) and first.gain is not None and first.gain.mean == pytest.approx(0.2)
    assert first.against_first is None
    # -0.05, -0.10, -0.15 by seed: mean -0.1, sd 0.05
    assert second.against_first is not None and second.against_first.mean == pytest.approx(-0.1)
    assert second.against_first.low == pytest.approx(-0.1 - 4.302653 * 0.05 / 3**0.5, abs=1e-6)


def test_the_table_names_each_run(runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["show", str(runs), "--by", "recipe"]) == 0
    said = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "over runs (Student's t)" in said[0]
    assert "at_grpo 3 60.0% [35.2%, 84.8%] +20.0% [-4.8%, 44.8%]" in said
    assert any(line.startswith("dr_mas 3 50.0% [37.6%, 62.4%]") and "-10.0% [-22.4%, 2.4%]" in line for line in said)
    assert "dr_mas: dr_mas-0 45.0% (seed 0), dr_mas-1 50.0% (seed 1), dr_mas-2 55.0% (seed 2)" in said
    assert main(["show", str(runs), "--by", "recipe", "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert [group["value"] for group in written["groups"]] == ["at_grpo", "dr_mas"]
    assert written["groups"][1]["last"]["n"] == 3


def test_what_the_table_does_not_show_is_told(runs: Path) -> None:
    make_run(runs / "at_grpo-again", 2, {"success": 0.9, "success_n": 40.0}, recipe="at_grpo", learner={"lr": 1e-3})
    make_run(runs / "no-figure", 3, {}, recipe="at_grpo")
    make_run(runs / "short", 4, {"success": 0.1, "success_n": 40.0}, recipe="dr_mas", steps=5)
    grouped = by_setting(open_runs([runs]), "recipe")
    assert grouped.groups[0].gain is None, "one run does not say where it started"
    assert grouped.notes == (
        "at_grpo: several runs have seed 2, so the interval is too narrow.",
        "Not finished: short.",
        "The runs also differ in learner.lr, steps: a difference may come from these.",
        "Left out, without this figure or setting: no-figure.",
    )


def test_another_setting_and_one_run_of_a_value(runs: Path) -> None:
    make_run(runs / "fast", 0, {"success": 0.9, "success_n": 40.0}, recipe="at_grpo", learner={"lr": 1e-3})
    groups = {group.value: group for group in by_setting(open_runs([runs]), "learner.lr").groups}
    assert {value: len(group.runs) for value, group in groups.items()} == {"0.0001": 6, "0.001": 1}
    assert groups["0.001"].last == Interval(mean=0.9, n=1) and groups["0.001"].against_first is None


def test_the_figure_is_one_of_the_runs_with_the_setting(tmp_path: Path) -> None:
    for seed in (0, 1):
        make_run(tmp_path / f"without-{seed}", seed, {"success": 0.5, "success_n": 40.0})
    make_run(tmp_path / "with", 0, {"reward": 0.7, "reward_n": 40.0}, guard="stop")
    grouped = by_setting(open_runs([tmp_path]), "guard")
    assert grouped.figure.startswith("held-out reward") and [group.value for group in grouped.groups] == ["stop"]
    assert grouped.notes == ("Left out, without this figure or setting: without-0, without-1.",)


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["{runs}", "--by", "recipes"], "--by = 'recipes' is no setting of these 6 runs. Did you mean recipe?"),
        (["{runs}/at_grpo-0", "--by", "recipe"], "needs a folder of runs"),
        (["{runs}", "--by", "recipe", "--role", "writer"], "--role cannot be used with --by"),
    ],
)
def test_bad_input(runs: Path, words: list[str], fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", *(word.format(runs=runs) for word in words)]) == 1
    assert fault in capsys.readouterr().err


def test_runs_without_a_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "runs" / "one", 0, {})
    assert main(["show", str(tmp_path / "runs"), "--by", "recipe"]) == 1
    assert "finds no run with a figure" in capsys.readouterr().err
