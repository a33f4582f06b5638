"""The headline of a run: what is trained comes first, and a chosen path is never called success."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cotune.reading.evaluations import claim_folder, read_evaluations
from cotune.reading.headline import Headline
from cotune.reading.run import OpenedRun
from cotune.reading.words import change_text
from cotune.records.structs import Episode, RewardRecord, Task
from cotune.storage.sqlite_store import SqliteStore


def line(step: int, **more: Any) -> dict[str, Any]:
    counts = {"episodes": 48, "calls": 8, "candidates": 32, "groups": 8, "left_out": {}, "outcome": {}, "roles": {}}
    return {"step": step, **counts, "path": "best of 8 by scorer", **more}


def interval(mean: float, low: float, high: float, n: int) -> dict[str, Any]:
    return {"mean": mean, "low": low, "high": high, "n": n}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """As the demo went: the best of eight candidates fell while single samples rose."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text("{}")
    lines = [
        line(0, outcome={"success": 0.979}, outcome_n={"success": 48}, roles={"writer": {"reward": 0.2}}),
        line(1, outcome={"success": 0.896}, outcome_n={"success": 47}, roles={"writer": {"reward": 0.7}}),
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(found) + "\n" for found in lines))
    return folder


def read_headline(folder: Path) -> Headline:
    with OpenedRun(folder) as run:
        return run.headline


def told(found: Headline) -> list[str]:
    return [change_text(change) for change in found.changes]


def evaluated(folder: Path, *, created: float, verdict: str, **modes: float) -> None:
    evaluations = {
        mode: {"episodes": 100, "success": interval(mean, mean - 0.05, mean + 0.05, 100), "failed": {"error: x": 2}}
        for mode, mean in modes.items()
    }
    compared = {"label": "trained", "against": "base", "success": interval(0.79, 0.7, 0.9, 100), "verdict": verdict}
    folder.mkdir(exist_ok=True)
    text = json.dumps({"evaluations": evaluations, "comparisons": [compared], "created": created})
    name = "evaluation.json" if folder.name != "held_out" else f"step-{int(created):06d}.json"
    (folder / name).write_text(text)


def test_without_held_out_tasks_rewards_of_all_candidates_come_first_and_the_best_of_k_is_named_so(run: Path) -> None:
    found = read_headline(run)
    assert told(found) == [
        "reward of writer: 0.2 in step 1, 0.7 in step 2",
        "best of 8 by scorer, success: 97.9% of 48 in step 1, 89.6% of 47 in step 2",
    ]
    assert [change.kind for change in found.changes] == ["role", "selected"]
    assert not any(change.name == "success" for change in found.changes)


def test_an_evaluation_comes_first_with_its_verdict_interval_count_and_failures(run: Path) -> None:
    evaluated(run / "eval", created=5, verdict="trained is better", base=0.1, trained=0.89, swapped=0.3)
    found = read_headline(run)
    assert told(found)[0] == (
        "held-out success: base 10.0% [5.0%, 15.0%] of 100, 2 failed, trained 89.0% [84.0%, 94.0%] of 100, 2 failed"
    )
    assert found.verdict == "trained is better" and found.evaluation and found.evaluation.name == "eval"
    assert found.changes[0].difference and found.changes[0].difference.mean == 0.79


def test_the_newest_evaluation_counts_whether_training_or_eval_made_it(run: Path) -> None:
    evaluated(run / "held_out", created=2, verdict="of training", base=0.1, trained=0.5)
    assert read_headline(run).verdict == "of training"
    evaluated(run / "eval", created=5, verdict="of eval", base=0.1, trained=0.89)
    evaluated(run / "eval-2", created=9, verdict="swapped alone", swapped=0.3)
    found = read_headline(run)
    assert found.verdict == "of eval"
    assert [one.name for one in read_evaluations(run)] == ["in training, after step 2", "eval", "eval-2"]
    assert claim_folder(run).name == "eval-3"


def test_only_shares_of_success_are_in_percent(run: Path) -> None:
    lines = [line(0, outcome={"success": 0.5}, roles={"success": {"reward": 0.2}}, held_out={"success": 0.5})]
    (run / "metrics.jsonl").write_text("".join(json.dumps(found) + "\n" for found in lines))
    percent = {change.name for change in read_headline(run).changes if change.percent}
    assert percent == {"held-out success", "best of 8 by scorer, success"}


def test_before_the_last_step_the_base_alone_is_told(run: Path) -> None:
    evaluated(run / "held_out", created=0, verdict="", base=0.1)
    assert told(read_headline(run))[0] == "held-out success: base 10.0% [5.0%, 15.0%] of 100, 2 failed"


def test_a_broken_evaluation_is_left_out_with_a_warning(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    evaluated(run / "eval", created=5, verdict="good", base=0.1, trained=0.89)
    (run / "eval-2").mkdir()
    (run / "eval-2" / "evaluation.json").write_text('{"evaluations": {"base": {}}}')
    assert read_headline(run).verdict == "good"
    assert "eval-2" in caplog.text and "left out" in caplog.text


def test_a_run_from_records_is_told_by_its_losses(run: Path) -> None:
    roles = [{"writer": {"loss": loss, "held_out_loss": held}} for loss, held in ((2.0, 2.5), (1.0, 1.5))]
    lines = [line(step, path="", roles=own) for step, own in enumerate(roles)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(found) + "\n" for found in lines))
    assert told(read_headline(run)) == ["held-out loss of writer: 2.5 in step 1, 1.5 in step 2"]


def test_records_are_told_by_phase_and_a_failed_episode_is_no_success(tmp_path: Path) -> None:
    with SqliteStore.open(tmp_path / "traced") as store:
        for number, (phase, status) in enumerate(
            [("trace", "ok"), ("trace", "error"), ("eval-base", "ok"), ("trace", "ok")]
        ):
            metrics = {"success": float(number != 2)} if status == "ok" else {}
            task = Task(id=str(number), input={})
            store.write(
                [Episode(id=f"e{number}", workflow="w", task=task, phase=phase, status=status, metrics=metrics)]
            )
            store.write([RewardRecord(f"e{number}", "team", 0.5)] if status == "ok" else [])
    assert told(read_headline(tmp_path / "traced"))[:2] == [
        "success of trace: trace 66.7% [20.8%, 93.9%] of 3",
        "success of eval-base: eval-base 0.0% [0.0%, 79.3%] of 1",
    ]
