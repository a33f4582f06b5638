"""`cotune.blame` with a scorer that does not repeat itself."""

from __future__ import annotations

import json
import random
from pathlib import Path
from statistics import pvariance
from typing import Any

import pytest

import cotune
from cotune.episodes.episode import EpisodeOptions, run_episode
from cotune.episodes.run_sync import run_sync
from cotune.episodes.workflows import workflow_of
from cotune.records.tasks import as_tasks
from cotune.storage.open_store import open_store
from cotune.terminal import terminal
from cotune.trainer.blame.estimates import scoring_noise
from cotune.trainer.blame.report import render
from tests.trainer.blame.office import Office, application, tasks


@pytest.fixture
def out(tmp_path: Path) -> str:
    return str(tmp_path / "blame")


def flipping(share: float) -> Any:
    """An application whose scorer gives the wrong outcome in this share of the runs."""
    plain, chance = application(("writer",)).cotune.fn, random.Random(5)

    @cotune.workflow
    async def solve(task: Any) -> float:
        outcome = await plain(task)
        return float(1 - outcome if chance.random() < share else outcome)

    return solve


def rendered(found: Any) -> str:
    console = terminal(width=80)
    with console.capture() as heard:
        console.print(render(found))
    return heard.get()


def test_half_the_squared_difference_of_two_scores_is_the_variance_of_one() -> None:
    noise = scoring_noise([(1.0, 0.0), (0.0, 0.0), (1.0, 1.0), (0.0, 1.0)], [1.0, 0.0, 1.0, 0.0])
    assert noise is not None
    # Two of four differ by 1: a variance of 0.25. The outcomes have that, too.
    assert (noise.runs, noise.changed, noise.deviation, noise.share) == (4, 2, 0.5, 1.0)
    assert scoring_noise([], [1.0]) is None
    steady = scoring_noise([(0.3, 0.1 + 0.2)], [0.3, 0.9])
    assert steady is not None and steady.changed == 0


def test_a_scorer_that_does_not_repeat_itself_has_a_row(out: str) -> None:
    made = Office({"writer": 0.2})
    app = flipping(0.4)
    found = cotune.blame(app, tasks(20), without=("writer",), out=out, responder=made, runs=4)
    noise = found.scoring
    assert noise is not None and noise.runs == 20 and 3 <= noise.changed <= 16
    assert 0.2 < noise.deviation < 0.7 and 0.3 < noise.share <= 1
    # No model is asked for it: two rounds of 20 runs asked the writer.
    assert made.asked.total() == 40
    report = rendered(found)
    row = next(line for line in report.splitlines() if line.startswith("scoring noise"))
    assert f"± {100 * noise.deviation:.0f}" in row
    assert f"Scoring noise: {noise.changed} of 20 runs got another outcome when scored again." in report
    assert json.loads(json.dumps(found.to_json()))["scoring"]["changed"] == noise.changed
    # The same command does not score them a third time.
    again = cotune.blame(app, tasks(20), without=("writer",), out=out, responder=made, runs=4)
    assert again.scoring == noise


def test_a_scorer_that_repeats_itself_has_none(out: str) -> None:
    found = cotune.blame(flipping(0.0), tasks(5), without=("writer",), out=out, responder=Office({}), runs=4)
    assert found.scoring is not None and (found.scoring.runs, found.scoring.changed) == (5, 0)
    assert "noise" not in rendered(found)


def test_the_opinion_of_a_judge_has_noise_too(out: str) -> None:
    plain, chance = application(("writer",)).cotune.fn, random.Random(3)

    @cotune.workflow
    async def judged(task: Any) -> None:
        await plain(task)

    @judged.judge
    def moody(episodes: Any, task: Any) -> list[float]:
        return [chance.random() for _ in episodes]

    found = cotune.blame(judged, tasks(6), out=out, responder=Office({}), runs=2)
    assert found.scoring is not None and (found.scoring.runs, found.scoring.changed) == (6, 6)


def test_only_runs_that_the_result_counts_are_compared(out: str) -> None:
    # Without a reference only failures run again: the redraws say nothing of all runs.
    found = cotune.blame(flipping(0.4), tasks(12), out=out, responder=Office({"writer": 0.3}), runs=6)
    noise = found.scoring
    assert noise is not None and noise.runs == 12 and found.runs > 12
    outcomes = []
    with open_store(out, read_only=True) as store:
        for episode in store.episodes():
            if episode.phase == "blame own" and episode.rollout == 0:
                outcomes.append(store.rewards([episode.id])[episode.id]["team"])
    assert noise.share == pytest.approx(min(1.0, noise.deviation**2 / pvariance(outcomes)))


def test_recorded_failures_are_not_scored_again(tmp_path: Path, out: str) -> None:
    app, made = application(("writer",)), Office({"writer": 0.5}, seed=2)
    with open_store(tmp_path / "traced") as store:
        for task in as_tasks(tasks(6)):
            run_sync(run_episode(workflow_of(app), task, sink=store, responder=made, options=EpisodeOptions()))
    found = cotune.blame(app, episodes=str(tmp_path / "traced"), out=out, responder=made, runs=3)
    assert found.scoring is None
    with open_store(out, read_only=True) as store:
        assert not [episode for episode in store.episodes() if episode.phase == "blame-rescored"]
