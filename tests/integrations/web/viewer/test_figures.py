"""A run comes to the same figures on every screen, and what was selected among candidates is never its success."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from cotune.adapters.card import card, read_background
from cotune.adapters.manifest import ExportedPolicy, ExportedRole, Manifest
from cotune.cli.main import main
from cotune.integrations.web.viewer.report import report
from cotune.integrations.web.viewer.server import viewing
from cotune.reading.curves import charts
from cotune.reading.run import OpenedRun
from cotune.records.structs import Episode, RewardRecord, Task
from cotune.storage.sqlite_store import SqliteStore
from tests.integrations.web.viewer.test_pages import text

MANIFEST = Manifest(
    format=1,
    cotune="0",
    created="",
    policies=(ExportedPolicy(name="writer", kind="provider", version=0),),
    roles=(ExportedRole(role="writer", policy="writer"),),
)
TASKS = {"t1": (True, True), "t2": (True, False), "t3": (False, True), "t4": (False, True), "t5": (False, False)}
"""Success of base and trained by task."""


def line(step: int, success: float, reward: float) -> dict[str, Any]:
    counts = {"episodes": 48, "calls": 8, "candidates": 32, "groups": 8, "rows": 30, "left_out": {"zero_variance": 2}}
    about = {"path": "best of 8 by scorer", "seconds": {"rollout": 2.0}}
    return {"step": step, "outcome": {"success": success}, "roles": {"writer": {"reward": reward}}, **about, **counts}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose best of eight fell while its policies rose, as those of examples/plan_path do."""
    folder = tmp_path / "r1"
    folder.mkdir()
    config = {"steps": 2, "recipe": "at_grpo", "plan": {"kind": "tree", "k": 8}}
    (folder / "run.json").write_text(json.dumps({"model": "m", "config": config}))
    lines = [line(0, 0.979, 0.19), line(1, 0.896, 0.91)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    with SqliteStore.open(folder) as store:
        for step in range(2):
            store.write([episode(f"T{step}", f"task-{step}", "train", success=True, step=step)])
    return folder


def episode(id: str, task: str, phase: str, *, success: bool, step: int | None = None) -> Episode:
    metrics = {"success": float(success)}
    about = {"phase": phase, "training_step": step, "metrics": metrics}
    return Episode(id=id, task=Task(id=task, input=task), workflow="w", **about)  # type: ignore[arg-type]


def mode(place: int) -> dict[str, Any]:
    endings = {task: {"status": "ok", "success": solved[place], "reward": 1.5} for task, solved in TASKS.items()}
    mean = sum(solved[place] for solved in TASKS.values()) / len(TASKS)
    return {"episodes": 5, "success": {"mean": mean, "low": 0.1, "high": 0.9, "n": 5}, "endings": endings}


def evaluate(folder: Path) -> Path:
    """An evaluation of the run, with its records beside it."""
    folder.mkdir()
    swapped = {**mode(0), "success": {"mean": 0.0, "low": 0.0, "high": 0.434, "n": 5}}
    evaluations = {"base": mode(0), "trained": mode(1), "swapped": swapped}
    compared = {"label": "trained", "against": "base", "verdict": "no difference shown between trained and base"}
    compared["success"] = {"mean": 0.2, "low": -0.3, "high": 0.6, "n": 5}  # type: ignore[assignment]
    (folder / "evaluation.json").write_text(json.dumps({"evaluations": evaluations, "comparisons": [compared]}))
    with SqliteStore.open(folder) as store:
        for place, name in enumerate(("base", "trained")):
            for task, solved in TASKS.items():
                id = f"{name}-{task}"
                store.write([episode(id, task, f"eval-{name}", success=solved[place]), RewardRecord(id, "team", 1.5)])
    return folder


def screens(run: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """What each screen says of the run, without mark-up and white space."""
    with viewing([run]) as server:
        found = {"overview": text(f"{server.url}/run/r1"), "runs page": text(f"{server.url}/?all=1")}
    opened = OpenedRun(run, "r1")
    plain = re.sub(r"<(style|script).*?</\1>", " ", report(opened, {}), flags=re.DOTALL)
    found["report"] = re.sub(r"<[^>]+>", " ", plain)
    opened.close()
    found["card"] = card(MANIFEST, read_background(run))
    for name, path in (("list of runs", run.parent), ("run", run)):
        assert main(["show", str(path)]) == 0
        found[name] = capsys.readouterr().out
    return {name: " ".join(said.split()) for name, said in found.items()}


def test_every_screen_says_the_same_of_base_and_trained(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluate(run / "eval")
    found = screens(run, capsys)
    for name, said in found.items():
        assert "held-out success" in said and "40.0%" in said and "60.0%" in said, name
        before = said.partition("best of 8 by scorer")[0].lower()
        assert "97.9%" not in before and "89.6%" not in before, name
        assert said.index("40.0%") < said.index("60.0%") or name == "overview", name
    for name in ("overview", "report", "card"):
        assert "no difference shown between trained and base" in found[name], name


def test_without_held_out_tasks_rewards_of_all_candidates_come_first(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, said in screens(run, capsys).items():
        assert "reward of writer" in said and "0.19" in said and "0.91" in said, name
        assert "success" not in said.lower().partition("best of 8 by scorer")[0].partition("figure")[2], name
        assert "97.9%" not in said.lower().partition("best of 8 by scorer")[0], name


def test_what_is_selected_has_no_change_in_points(run: Path) -> None:
    opened = OpenedRun(run, "r1")
    assert "points" not in re.sub(r"<(style|script).*?</\1>", " ", report(opened, {}), flags=re.DOTALL)
    opened.close()
    with viewing([run]) as server:
        assert "Best of 8 by scorer, success" in text(f"{server.url}/run/r1/curves")
        assert "Success in training" not in text(f"{server.url}/run/r1/curves")
        assert "Success of the best of 8 by scorer, not of single samples," in text(f"{server.url}/run/r1/tasks")


def test_an_evaluation_shows_modes_side_by_side_and_the_tasks_that_got_worse_first(run: Path) -> None:
    evaluate(run / "eval")
    with viewing([run]) as server:
        page = f"{server.url}/run/r1/evaluations"
        said = text(page)
        assert "no difference shown between trained and base" in said
        assert "base 40.0% 10.0% – 90.0% 5 tasks" in said and "trained 60.0% 10.0% – 90.0% 5 tasks" in said
        assert re.findall(r"\bt\d\b", said.partition("By task")[2]) == ["t2", "t5", "t1", "t3", "t4"]
        assert "t2 -1 solved 1.5 not solved 1.5" in said
        assert "all 5 lost 1 gained 2 unchanged 2" in said
        assert re.findall(r"\bt\d\b", text(f"{page}?kind=lost").partition("By task")[2]) == ["t2"]
        assert re.findall(r"\bt\d\b", text(f"{page}?kind=gained").partition("By task")[2]) == ["t3", "t4"]
        linked = text(f"{server.url}/run/r1:eval/episode/trained-t2")
        assert "not solved" in linked and "eval-trained" in linked
        assert "5 tasks" in text(f"{page}?name=eval&mode=trained&against=base&from=-1")
        assert "t2" not in text(f"{page}?from=5").partition("By task")[2]


def test_the_report_lists_only_tasks_that_lost(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> str:
        opened = OpenedRun(run, "r1")
        said = " ".join(re.sub(r"<[^>]+>", " ", report(opened, {})).split())
        opened.close()
        return said.partition("lost most from base to trained")[2].partition("Episodes")[0] or said

    evaluate(run / "eval")
    assert re.findall(r"\bt\d\b", lost()) == ["t2"] and "1 of 5 tasks lost." in lost()
    monkeypatch.setitem(TASKS, "t2", (True, True))
    shutil.rmtree(run / "eval")
    evaluate(run / "eval")
    assert "No task lost from base to trained." in lost()


def test_records_of_an_evaluation_by_themselves_are_told_by_mode(run: Path) -> None:
    with viewing([evaluate(run.parent / "elsewhere")]) as server:
        said = text(f"{server.url}/run/elsewhere")
        assert "held-out success 60.0%" in said and "base 40.0%" in said
        assert "t2 -1 solved" in text(f"{server.url}/run/elsewhere/evaluations")
        assert "not solved" in text(f"{server.url}/run/elsewhere/episode/trained-t2")


def test_before_and_after_are_one_task(run: Path) -> None:
    opened = OpenedRun(run, "r1")
    assert "No task was tried twice, so there is no before and after" in report(opened, {})
    opened.close()
    evaluate(run / "eval")
    opened = OpenedRun(run, "r1")
    said = " ".join(re.sub(r"<[^>]+>", " ", report(opened, {})).split()).partition("whatever their outcome.")[2]
    opened.close()
    assert re.findall(r"Task (t\d) before: base (solved|not solved).*?after: trained (solved|not solved)", said) == [
        (task, *("solved" if one else "not solved" for one in solved)) for task, solved in TASKS.items()
    ]


def test_a_run_without_an_evaluation_says_how_to_make_one(run: Path) -> None:
    with viewing([run]) as server:
        said = text(f"{server.url}/run/r1/evaluations")
    assert f"cotune eval WORKFLOW --tasks held_out.jsonl --run {run}" in said


def test_held_out_curves_begin_before_the_first_step(run: Path) -> None:
    lines = [{**line(step, 0.9, 0.5), "held_out": {"success": 0.5 + step / 4, "episodes": 5}} for step in range(2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    (run / "held_out").mkdir()
    for steps, modes in ((0, ("base",)), (2, ("base", "trained"))):
        evaluations = {name: mode(place) for place, name in enumerate(modes)}
        about = {"evaluations": evaluations, "steps": steps, "created": steps + 1}
        (run / "held_out" / f"step-{steps:06}.json").write_text(json.dumps(about))
    with SqliteStore.open(run) as store:
        for step, success in ((-1, False), (1, True)):
            store.write([episode(f"H{step}", "t3", "eval", success=success, step=step)])
    opened = OpenedRun(run, "r1")
    (chart,) = (chart for chart in charts([opened]) if chart.title == "Success on held-out tasks")
    said = " ".join(re.sub(r"<[^>]+>", " ", report(opened, {})).split())
    opened.close()
    assert chart.steps == [0, 1, 2] and chart.series[0].values == [0.4, 0.5, 0.75]
    assert "Task t3 before: base not solved" in said and "after: trained solved" in said
    assert "in training, after step 2" in said
