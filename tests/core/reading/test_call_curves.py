"""Calls and turns per episode as curves of training and of its evaluations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cotune.reading.curves import Chart, charts
from cotune.reading.evaluations import EvaluatedMode, EvaluationReport, TaskEnding, step_file
from cotune.reading.run import OpenedRun


def line(step: int, calls: int, held_out_calls: float, **more: Any) -> dict[str, Any]:
    return {
        "step": step, "episodes": 4, "failed": 0, "calls": calls, "candidates": 8, "groups": 2, "rows": 6,
        "path": "single samples", "outcome": {}, "roles": {"solver": {"turns": calls / 4 - 1}}, "left_out": {},
        "seconds": {"rollout": 1.0}, "counters": {}, "held_out": {"calls": held_out_calls, "success": 0.5}, **more,
    }  # fmt: skip


def curves(folder: Path, lines: list[dict[str, Any]]) -> dict[str, Chart]:
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"model": "m", "config": {"recipe": "at_grpo", "steps": 2}}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    with OpenedRun(folder) as run:
        return {chart.title: chart for chart in charts([run])}


def test_calls_and_turns_have_curves(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    step_file(folder, 0).parent.mkdir(parents=True)
    endings = {
        "a": TaskEnding(status="ok", success=True, calls=7),
        "b": TaskEnding(status="ok", success=True, calls=6),
        "c": TaskEnding(status="error", success=False, calls=1),
    }
    played = EvaluatedMode(label="base", episodes=3, endings=endings)
    base = EvaluationReport(evaluations={"base": played}, steps=0)
    step_file(folder, 0).write_text(json.dumps(base.to_json()))
    found = curves(folder, [line(0, 26, 6.0), line(1, 20, 5.2)])
    held_out = found["Calls per held-out episode"]
    assert held_out.steps == [0, 1, 2] and held_out.series[0].values == [6.5, 6.0, 5.2], "failed episodes do not count"
    assert held_out.series[0].low is None and "band" not in held_out.help
    assert found["Calls per episode"].series[0].values == [6.5, 5.0]
    turns = found["Turns per episode"].series[0]
    assert (turns.label, turns.values) == ("solver", [5.5, 4.0])


def test_forks_have_no_curve_of_calls(tmp_path: Path) -> None:
    """A fork makes only the calls after it."""
    found = curves(tmp_path / "run", [line(0, 26, 6.0, replay={"forks": 3})])
    assert "Calls per episode" not in found and "Calls per held-out episode" in found
