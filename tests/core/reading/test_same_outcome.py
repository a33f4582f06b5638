"""All that reads what episodes came to says the same of the same records: shares of success, means and sums."""

from __future__ import annotations

import html
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from starlette.testclient import TestClient

from cotune.adapters.card import card, read_background
from cotune.algorithms.goal import Goal
from cotune.cli.main import main
from cotune.cli.printing.overview import show_run
from cotune.cli.printing.runs import list_runs
from cotune.episodes.workflows import Workflow
from cotune.integrations.web.viewer.episodes import Filters, listed
from cotune.integrations.web.viewer.pages import build_app
from cotune.integrations.web.viewer.report import report, write_report
from cotune.reading.curves import charts
from cotune.reading.facts import facts
from cotune.reading.find_runs import FoundRuns, open_runs
from cotune.reading.headline import Change
from cotune.reading.recorded_answers import outcome_values
from cotune.reading.run import OpenedRun
from cotune.reading.tasks import tasks
from cotune.reading.words import interval_text
from cotune.records.structs import CallRecord, Episode, RewardRecord, Task, Usage
from cotune.storage.outcomes import failure_reward, success_counts
from cotune.storage.sqlite_store import SqliteStore
from cotune.trainer.evaluation.recorded import read_recorded
from cotune.trainer.evaluation.run import share_floor
from cotune.trainer.reporting.loggers import tracker_figures
from cotune.trainer.reporting.metrics import outcome_means
from tests.integrations.web.viewer.test_figures import MANIFEST

NOTHING: dict[str, Any] = {}


def records(folder: Path, *ends: tuple[str, Any, dict[str, float]]) -> Path:
    """Episodes, each of its own task, with a status, a success as it was reported (None: not), and rewards."""
    folder.mkdir()
    with SqliteStore.open(folder) as store:
        for number, (status, success, rewards) in enumerate(ends):
            metrics = {} if success is None else {"success": success}
            task = Task(id=f"t{number}", input=number)
            episode = Episode(id=f"e{number}", task=task, workflow="w", status=status, metrics=metrics)  # type: ignore[arg-type]
            store.write([episode, *(RewardRecord(f"e{number}", name, value) for name, value in rewards.items())])
    return folder


def change(folder: Path, name: str) -> Change | None:
    with OpenedRun(folder) as run:
        return next((change for change in run.headline.changes if change.name == name), None)


def shares(folder: Path) -> set[tuple[float, int]]:
    """Solved episodes and how many there were, as each reader has it."""
    found = {(round(one.last.mean * one.last.n), one.last.n) for one in [change(folder, "success")] if one}
    with SqliteStore.open(folder, read_only=True) as store:
        found |= {(solved, n) for _, solved, n, _ in store.rows(success_counts())}
        listed = list(store.episodes())
        mean = outcome_means(listed, store.rewards(e.id for e in listed)).get("success")
        found |= set() if mean is None else {(round(mean.mean * mean.n), mean.n)}
    evaluated, _ = read_recorded(folder, [], {})
    found |= (
        {(round(evaluated.success.mean * evaluated.success.n), evaluated.success.n)} if evaluated.success else set()
    )
    run = OpenedRun(folder, "traced")
    try:
        page = tasks(run, "trace")
        values = [row.value for row in page.rows if row.value is not None]
        found |= {(round(sum(values)), len(values))} if page.measure == "success" else set()
    finally:
        run.close()
    return found


TEAM = {"team": 1.0}


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([("ok", 1.0, TEAM), ("ok", None, TEAM)], (1, 2)),  # one that reports none has not solved its task
        ([("ok", 1.0, TEAM), ("ok", None, NOTHING)], (1, 1)),  # nobody knows what came of it
        ([("ok", 1.0, TEAM), ("error", None, NOTHING), ("cancelled", None, NOTHING)], (1, 2)),
        ([("ok", 1.0, TEAM), ("error", 1.0, TEAM)], (1, 2)),  # a failed episode is no success
        ([("ok", True, TEAM), ("ok", False, TEAM), ("ok", 0.4, TEAM), ("ok", 1, TEAM)], (2, 4)),
        ([("ok", "yes", TEAM), ("ok", "true", TEAM), ("ok", "No", TEAM), ("ok", "False", TEAM)], (2, 4)),
        ([("ok", "hardly", TEAM), ("ok", 1.0, TEAM)], (1, 2)),  # which reports none
        ([("ok", None, TEAM), ("error", None, NOTHING)], None),  # where none does, there is no share of success
        ([("ok", "hardly", TEAM)], None),
    ],
)
def test_one_share_of_success(tmp_path: Path, ends: Any, expected: tuple[int, int] | None) -> None:
    assert shares(records(tmp_path / "traced", *ends)) == ({expected} if expected else set())


async def sometimes_told(task: Any) -> Any:
    return [True, {"team": 1.0}, {"team": None}][task["n"]]


TOLD = Workflow("told", sometimes_told)


def test_trace_counts_as_show_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in range(3)))
    words = ["trace", f"{__name__}:TOLD", "--tasks", str(tmp_path / "tasks.jsonl"), "--out", str(tmp_path / "traced")]
    for _ in range(2):  # of the episodes of this command alone
        main(words)
        assert "success 50.0% (1 of 2 episodes)" in capsys.readouterr().out
    told = change(tmp_path / "traced", "success")
    assert told and (told.last.mean, told.last.n) == (0.5, 4)


def test_episodes_of_one_task_are_one_observation(tmp_path: Path) -> None:
    """Ten tasks, run ten times each, five of them always solved: Wilson's interval of 5 of 10, not of 50 of 100."""
    (tmp_path / "traced").mkdir()
    with SqliteStore.open(tmp_path / "traced") as store:
        for task in range(10):
            store.write(
                [
                    Episode(
                        id=f"e{task}-{number}",
                        task=Task(id=f"t{task}", input=task),
                        workflow="w",
                        phase="trace",
                        metrics={"success": float(task < 5)},
                    )
                    for number in range(10)
                ]
            )
    told = change(tmp_path / "traced", "success")
    assert told is not None
    assert interval_text(told.last, True) == "50.0% [23.7%, 76.3%]" and told.last.n == 100


def test_what_is_reported_stands_beside_its_episode(tmp_path: Path) -> None:
    ends = [("ok", "yes", TEAM), ("ok", 0.4, TEAM), ("error", 1.0, TEAM), ("ok", None, TEAM), ("error", None, NOTHING)]
    run = OpenedRun(records(tmp_path / "traced", *ends), "traced")
    try:
        shown = {row.id: row.success for row in listed(run, Filters()).rows}
        assert shown == {"e0": 1, "e1": 0, "e2": 0, "e3": None, "e4": None}
        assert {e.id: e.solved for e in run.store.episodes()} == shown
        assert facts(run).steps == ""
    finally:
        run.close()


@pytest.mark.parametrize(("on_failure", "good", "none"), [("lowest", -2.0, -2.0), ("reward:-1", 1.0, -1.0)])
def test_a_failed_episode_counts_its_own_reward(tmp_path: Path, on_failure: str, good: float, none: float) -> None:
    """One ended well, one failed with a reward of its own, and one failed without any."""
    ends = [("ok", None, {"team": good}), ("error", None, {"team": 0.7}), ("error", None, NOTHING)]
    folder, mean = records(tmp_path / "run", *ends), (good + 0.7 + none) / 3
    (folder / "run.json").write_text(json.dumps({"config": {"on_failure": on_failure}}))
    with SqliteStore.open(folder, read_only=True) as store:
        listed, failed = list(store.episodes()), failure_reward(on_failure)
        means = outcome_means(listed, store.rewards(e.id for e in listed), failed=failed)
        assert means == {"team": (pytest.approx(mean), 3)}
        assert outcome_values(store, failed) == {"e0": good, "e1": 0.7, "e2": none}
    told = change(folder, "team")
    assert told and (told.last.mean, told.last.n) == (pytest.approx(mean), 3)
    evaluated, _ = read_recorded(folder, [], {}, Goal(on_failure=failed))
    assert [e.reward for e in share_floor([evaluated])[0].endings.values()] == [good, 0.7, none]
    assert sum(evaluated.failed.values()) == 2
    run = OpenedRun(folder, "run")
    try:
        assert [row.value for row in tasks(run, "trace").rows] == [good, 0.7, none]
    finally:
        run.close()
    write_report(folder, tmp_path / "report.html")
    assert interval_text(told.last, False) in (tmp_path / "report.html").read_text()
    heard = io.StringIO()
    Console(file=heard, width=200).print(show_run(folder))
    row = next(line.split() for line in heard.getvalue().splitlines() if line.split()[:1] == ["trace"])
    assert row[-1] == f"{mean:.3g}" and row[3] == "2", "episodes that ended with an error stay counted"


def told_by_each(folder: Path) -> dict[str, str]:
    """A run as text, by who tells it; spaces are single."""
    heard = io.StringIO()
    console = Console(file=heard, width=300)
    console.print(show_run(folder))
    told = {"show": heard.getvalue()}
    heard.truncate(0)
    console.print(list_runs(open_runs([folder])))
    told["runs"] = heard.getvalue()
    with OpenedRun(folder) as run:
        found = FoundRuns([folder])
        pages = TestClient(build_app(found, prices={"m": (1e6, 2e6)}), base_url="http://127.0.0.1")
        told["view"] = "".join(pages.get(f"/run/{folder.name}{part}").text for part in ("", "/use", "/groups"))
        found.close()
        told["report"] = report(run, {"m": (1e6, 2e6)})
    told["card"] = card(MANIFEST, read_background(folder))
    return {who: " ".join(re.sub(r"<[^>]+>", " ", html.unescape(text)).split()) for who, text in told.items()}


def test_a_run_is_the_same_wherever_it_is_shown(tmp_path: Path) -> None:
    """A figure that is told by several of show, runs, view, report, the card and the tracker is the same in each."""
    ends = [("ok", 1.0, TEAM), ("error", None, NOTHING), ("error", None, NOTHING)]
    folder = records(tmp_path / "run", *ends)
    lines = []
    for step, reward in enumerate((0.25, 0.75)):
        about = {"calls": 3, "candidates": 6, "groups": 1, "rows": 4, "episodes": 3, "left_out": {"zero_variance": 2}}
        roles = {"writer": {"reward": reward, "entropy": 0.5}}
        lines.append({"step": step, "outcome": {}, "roles": roles, "seconds": {"rollout": 30.0}, **about})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = {"steps": 4, "recipe": "at_grpo", "prices": {"m": [1e6, 2e6]}}
    (folder / "run.json").write_text(json.dumps({"config": config}))
    with SqliteStore.open(folder) as store:
        use = Usage(prompt_tokens=7, completion_tokens=11)
        store.write([Episode(id="e3", task=Task(id="t3", input=3), workflow="w", phase="train", training_step=1)])
        store.write(
            [
                CallRecord(id=f"c{n}", episode="e0", role="writer", step=n, turn=n, model="m", usage=use, status=status)  # type: ignore[arg-type]
                for n, status in enumerate(("ok", "ok", "timeout"))
            ]
        )
    told = told_by_each(folder)
    expected = {
        "2 of 4": "runs view report card",
        "at_grpo": "runs view report card",
        "reward of writer: 0.25 in step 1, 0.75 in step 2": "show runs card",
        "2 episodes of trace failed: no reason recorded": "show view report",
        "1 call of writer: timeout": "show report",
        "writer 3 1": "show view report",  # calls, failed
        "writer 3 1 3 0 21 33": "show",
        "writer 3 1 21 33 87": "view report",  # with tokens and cost
        "training: writer | 3 | 21 | 33 | 87": "card",
        "zero_variance 2 33.3%": "view",
        "60.0 s": "view report",
    }
    missing = {text: [who for who in whom.split() if text not in told[who]] for text, whom in expected.items()}
    assert {text: whom for text, whom in missing.items() if whom} == {}
    tracked = tracker_figures({**lines[-1], "held_out": {}})
    with OpenedRun(folder) as run:
        curves = {chart.title: chart.series[0].values for chart in charts([run])}
    assert curves["Reward"] == [0.25, tracked["1_main/2_reward/writer"]] and curves["Entropy"][-1] == 0.5
    assert curves["Candidates trained on"] == [4.0, tracked["step/rows"]]
    assert curves["Left out, by reason"][-1] == tracked["left_out/zero_variance"] == 2.0
