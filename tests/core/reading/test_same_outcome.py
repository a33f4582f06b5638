"""All that reads what episodes came to says the same of the same records: shares of success, means and sums."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cotune.algorithms.goal import Goal
from cotune.cli.main import main
from cotune.cli.printing.overview import show_run
from cotune.episodes.workflows import Workflow
from cotune.integrations.web.viewer.episodes import Filters, listed
from cotune.integrations.web.viewer.report import write_report
from cotune.reading.headline import Change
from cotune.reading.recorded_answers import outcome_values
from cotune.reading.run import OpenedRun
from cotune.reading.tasks import tasks
from cotune.reading.words import interval_text
from cotune.records.structs import Episode, RewardRecord, Task
from cotune.storage.outcomes import failure_reward, success_counts
from cotune.storage.sqlite_store import SqliteStore
from cotune.trainer.evaluation.recorded import read_recorded
from cotune.trainer.evaluation.run import share_floor
from cotune.trainer.reporting.metrics import outcome_means

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
        found |= {(solved, n) for _, solved, n in store.rows(success_counts())}
        listed = list(store.episodes())
        mean = outcome_means(listed, store.rewards(e.id for e in listed)).get("success")
        found |= set() if mean is None else {(round(mean * n), n) for _, n in found}
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


def test_what_is_reported_stands_beside_its_episode(tmp_path: Path) -> None:
    ends = [("ok", "yes", TEAM), ("ok", 0.4, TEAM), ("error", 1.0, TEAM), ("ok", None, TEAM), ("error", None, NOTHING)]
    run = OpenedRun(records(tmp_path / "traced", *ends), "traced")
    try:
        shown = {row.id: row.success for row in listed(run, Filters()).rows}
        assert shown == {"e0": 1, "e1": 0, "e2": 0, "e3": None, "e4": None}
        assert run.store and {e.id: e.solved for e in run.store.episodes()} == shown
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
        assert means == {"team": pytest.approx(mean)}
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
