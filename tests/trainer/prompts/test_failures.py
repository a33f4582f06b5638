"""What a search does where outcomes, models or prices are missing, and where it is stopped in between."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

import cotune
from cotune.config.train import EvaluationConfig
from cotune.episodes.workflows import workflow_of
from cotune.errors import ConfigError, RunError
from cotune.judging.episodes import Ranking
from cotune.prompts.edits import Prompts
from cotune.prompts.file import read_prompts
from cotune.recording.recorder import LiveCall
from cotune.records.answers import Answer
from cotune.records.ids import candidate_id
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.open_store import open_store
from cotune.trainer.prompts.by_hand import compare_prompts
from cotune.trainer.prompts.improve import improve
from cotune.trainer.prompts.options import ImproveOptions, load_options, read_search
from cotune.trainer.prompts.outcome import ImproveReport, verdict_text
from cotune.trainer.prompts.spending import LimitReached
from tests.trainer.prompts import travel

ROUNDS = ImproveOptions(rounds=16, max_calls=600, blame="off")


def searched(out: Path, app: Any = None, options: ImproveOptions = ROUNDS, **given: Any) -> ImproveReport:
    given = {"responder": travel.Office(), "reflector": travel.Reflector(), **given}
    return improve(app or travel.application(), travel.tasks(30), options, out=out, **given)


def compared(app: Any, out: Path) -> None:
    compare_prompts(app, travel.tasks(4), Prompts(parts=()), Prompts(parts=()), out)


def single(outcome: Callable[[Any, str], Any]) -> Any:
    @cotune.workflow
    async def solve(task: Any) -> Any:
        return outcome(task, await travel.ask("planner", travel.PLANNER, f"{task['days']} days in {task['city']}, ok?"))

    return solve


def test_without_gepa_nothing_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "gepa"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "gepa", None)
    office = travel.Office()
    with pytest.raises(ModuleNotFoundError):
        searched(tmp_path / "p", responder=office)
    assert not office.asked


def test_an_application_without_outcomes_is_not_searched(tmp_path: Path) -> None:
    app, reflector = single(lambda task, said: {"team": None}), travel.Reflector()
    with pytest.raises(RunError, match="has an outcome, and a search needs one"):
        searched(tmp_path / "p", app, reflector=reflector)

    def closed(episodes: Any, task: Any) -> Any:
        raise ValueError("no key for the judge")

    judged = single(lambda task, said: None)
    judged.judge(closed)
    with pytest.raises(RunError, match="no key for the judge"):
        searched(tmp_path / "judged", judged, reflector=reflector)
    assert not reflector.requests


def test_held_out_tasks_without_an_outcome_are_left_out_of_the_verdict(tmp_path: Path) -> None:
    def outcome(task: Any, said: str) -> Any:
        good = task["city"] in said
        return {"team": None} if good and task["days"] % 3 == 0 else float(good)

    report = searched(tmp_path / "p", single(outcome), reflector=travel.Reflector(rules=(travel.NAME_CITY,)))
    held = report.held_out
    assert held is not None and held.unknown and held.tasks + held.unknown == 10
    assert (held.base, held.best, report.verdict) == (0.0, 1.0, "better")
    assert "without a known outcome" in verdict_text(report)


def test_rewards_of_several_names_are_perfect_at_their_sum(tmp_path: Path) -> None:
    app = single(lambda task, said: {"answered": True, "city": task["city"] in said})
    report = searched(tmp_path / "p", app, reflector=travel.Reflector(rules=(travel.NAME_CITY,)))
    assert report.verdict == "better" and report.held_out is not None and report.held_out.best == 2.0


def test_a_judge_that_hangs_costs_the_outcome_of_its_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotune.trainer.prompts.tasks.VALIDATION", 0.9)

    def judge(episodes: Any, task: Any) -> list[float]:
        if task["days"] == 7:
            time.sleep(30)
        return [float(task["city"] in one.calls[-1].answer.text) for one in episodes]

    app = single(lambda task, said: None)
    app.judge(judge)
    options = ImproveOptions(rounds=1, max_calls=200, blame="off", episode_timeout=4.0)
    report = searched(tmp_path / "p", app, options, reflector=travel.Reflector(rules=(travel.NAME_CITY,)))
    assert report.counts["judge_errors"] >= 1
    assert "did not finish within 4 seconds on task 't7'" in report.errors["judge_errors"]


class Compares(Ranking):
    name = "liked"


def test_a_judge_that_compares_episodes_is_refused_before_anything_runs(tmp_path: Path) -> None:
    app = workflow_of(single(lambda task, said: None))
    judged: Any = replace(app, episode_judge=Compares())
    for ask in (lambda: searched(tmp_path / "p", judged), lambda: compared(judged, tmp_path / "c")):
        with pytest.raises(ConfigError, match="a judge of single episodes"):
            ask()
    assert not list(tmp_path.iterdir())


class Down(travel.Office):
    async def respond(self, call: LiveCall) -> Answer:
        self.asked.append((call.role, ""))
        raise ConnectionError("no route to the model")


def test_a_provider_that_is_down_is_not_asked_for_every_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = asyncio.sleep
    monkeypatch.setattr("cotune.trainer.prompts.evaluations.asyncio.sleep", lambda seconds: sleep(0))
    office = Down()
    with pytest.raises(RunError, match="no route to the model"):
        searched(tmp_path / "p", responder=office, options=ImproveOptions(concurrency=2))
    assert len(office.asked) <= 6


def test_answers_that_a_killed_process_did_not_score_are_scored(tmp_path: Path) -> None:
    app, left, options = workflow_of(travel.application()), iter(range(6)), ImproveOptions(rounds=1, blame="off")
    scorer: Any = app.scorers["writer"]

    def killed(*about: Any) -> Any:
        if next(left, None) is None:
            os._exit(9)
        return scorer(*about)

    if not (child := os.fork()):
        searched(tmp_path / "p", replace(app, scorers={**app.scorers, "writer": killed}), options)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    searched(tmp_path / "p", options=options, resume=True)
    with open_store(tmp_path / "p", read_only=True) as store:
        episodes = [one for one in store.episodes(EpisodeFilters(phase="prompts")) if one.is_outcome]
        answers = [candidate_id(call.id, 0) for one in episodes for call in store.calls(one.id)]
        assert set(answers) == {target for target, rewards in store.rewards(answers).items() if rewards}


def interrupt(office: travel.Office, calls: int) -> travel.Office:
    left = iter(range(calls))
    office.before = lambda: None if next(left, None) is not None else signal.raise_signal(signal.SIGINT)
    return office


def test_an_interrupted_analysis_continues(tmp_path: Path) -> None:
    options = ImproveOptions(rounds=1, max_calls=400, concurrency=1)
    with pytest.raises(KeyboardInterrupt):
        searched(tmp_path / "p", options=options, responder=interrupt(travel.Office(), 40))
    report = searched(tmp_path / "p", options=options, resume=True)
    whole = searched(tmp_path / "whole", options=options)
    # The runs that the interruption cut off were paid for, and are counted.
    verdict, whole_verdict = (re.sub(r"after \d+ calls", "after N calls", text.blame) for text in (report, whole))
    assert verdict == whole_verdict and "0% of the failures succeed at another try" in verdict
    assert report.spending["blame"]["calls"] - whole.spending["blame"]["calls"] <= 2


def test_a_search_goes_on_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, other = tmp_path / "work", tmp_path / "other"
    work.mkdir()
    other.mkdir()
    (work / "sought.py").write_text("from tests.trainer.prompts import travel\n\nsolve = travel.application()\n")
    for file, tasks in (("tasks", travel.tasks(20)), ("held", travel.tasks(10, 20))):
        (work / f"{file}.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    monkeypatch.chdir(work)
    monkeypatch.setattr("sys.path", [*sys.path, str(work)])
    options = msgspec.structs.replace(ROUNDS, evaluation=EvaluationConfig(tasks="held.jsonl"), rounds=2)
    given = {"responder": travel.Office(), "reflector": travel.Reflector()}
    improve("sought:solve", "tasks.jsonl", options, out="p", **given)
    monkeypatch.chdir(other)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path != str(work)])
    monkeypatch.delitem(sys.modules, "sought")
    search = read_search(work / "p")
    improve(
        search.app,
        search.tasks,
        load_options(None, {"rounds": 3}, search.options),
        out=work / "p",
        resume=True,
        **given,
    )


def test_an_interrupted_resume_keeps_the_verdict(tmp_path: Path) -> None:
    report = searched(tmp_path / "p", options=ImproveOptions(rounds=4, blame="off"))
    assert report.held_out is not None
    with pytest.raises(KeyboardInterrupt):
        more = ImproveOptions(rounds=60, blame="off")
        searched(tmp_path / "p", options=more, resume=True, responder=interrupt(travel.Office(), 0))
    kept = read_prompts(tmp_path / "p")
    assert kept.id == report.prompts.id and kept.evaluation["held_out"] == report.held_out.to_json()


def test_what_has_no_price_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"price of the reflection model m.*0/0"):
        ImproveOptions(reflection="m", max_cost=5, prices={"office": (1.0, 1.0)})
    options = ImproveOptions(rounds=2, max_calls=600, blame="off", max_cost=5, prices={"offic": (1.0, 1.0)})
    report = searched(tmp_path / "p", options=options)
    assert any("counted as no money" in note and "of planner" in note for note in report.notes)


def test_a_limit_that_leaves_no_room_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LimitReached, match=r"0 calls are made.*20 runs are kept for the held-out tasks"):
        searched(tmp_path / "p", options=ImproveOptions(max_calls=12))

    async def full(*_: Any) -> None:
        raise LimitReached("The search has reached max_calls = 2000.", "Go on with --resume.")

    monkeypatch.setattr("cotune.trainer.prompts.by_hand.compare_held_out", full)
    with pytest.raises(LimitReached, match="Pass a file with fewer tasks"):
        compared(travel.application(), tmp_path / "c")
