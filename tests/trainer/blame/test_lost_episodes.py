"""`cotune.blame(episodes=...)`: the call that lost an episode, found by forks of an application with known errors."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import Any

import openai
import pytest

import cotune
from cotune.episodes.episode import EpisodeOptions, run_episode
from cotune.episodes.run_sync import run_sync
from cotune.episodes.workflows import workflow_of
from cotune.errors import ConfigError
from cotune.reading.blame import DECISIVE, FORK, FRESH_FORK, Blame
from cotune.recording.recorder import LiveCall
from cotune.records.answers import Answer
from cotune.records.structs import CallRecord, Episode, Fork, RewardRecord, Task
from cotune.records.tasks import as_tasks
from cotune.storage.open_store import open_store
from cotune.terminal import terminal
from cotune.trainer.blame import decisive
from cotune.trainer.blame.decisive import Decision
from cotune.trainer.blame.options import BlameOptions
from cotune.trainer.blame.report import render
from cotune.trainer.blame.runs import AT_LIMIT
from cotune.trainer.blame.tasks import failed_tasks, tasks_to_analyse
from tests.trainer.blame.office import Office, application, ask, tasks


@pytest.fixture
def out(tmp_path: Path) -> str:
    return str(tmp_path / "blame")


def render_text(found: Blame) -> str:
    """The report at the terminal."""
    console = terminal(width=80)
    with console.capture() as heard:
        console.print(render(found))
    return heard.get()


def wrong_calls(out: str, episode: str) -> list[int]:
    """Steps of the calls that said something wrong first in an episode."""
    with open_store(out, read_only=True) as store:
        said = [call.candidates[0].text for call in store.calls(episode)]
    return [said.index("wrong")] if "wrong" in said else []


def test_the_call_that_went_wrong_is_found(out: str) -> None:
    made = Office({"writer": 0.3, "checker": 0.2}, seed=3)
    found = cotune.blame(application(), tasks(6), episodes="failed", out=out, responder=made, runs=20)
    assert found.verdict == "untested" and 0 < len(found.episodes) <= 5
    decisive = [one for one in found.episodes if one.call is not None]
    assert len(decisive) >= len(found.episodes) - 1
    for one in decisive:
        assert [one.call] == wrong_calls(out, one.episode)
        assert (one.answer, one.role) == ("wrong", ("planner", "writer", "checker")[one.call or 0])
        assert one.redraw != "wrong"
        assert one.loss is not None and one.loss.low is not None and one.loss.low > 0.1
    report = render_text(found)
    assert "Calls that lost an episode" in report and "decided by luck, by role: " in report
    assert DECISIVE in " ".join(report.split())
    # The same command makes no further fork.
    asked = made.asked.total()
    again = cotune.blame(application(), tasks(6), episodes="failed", out=out, responder=made, runs=20)
    assert [(one.episode, one.call) for one in again.episodes] == [(one.episode, one.call) for one in found.episodes]
    assert made.asked.total() - asked <= 6 * 3


def test_the_same_command_repeats_its_answer_within_the_budget(out: str) -> None:
    made = Office({"writer": 0.2}, seed=1)
    settings: dict[str, Any] = {"episodes": "failed", "out": out, "responder": made, "concurrency": 1}

    def fork_count() -> int:
        with open_store(out, read_only=True) as store:
            return sum(episode.phase in (FORK, FRESH_FORK) for episode in store.episodes())

    # The budget has no room for twelve fresh forks before and after a call.
    found = cotune.blame(application(), tasks(6), runs=14, **settings)
    forks = fork_count()
    assert any(one.call is not None for one in found.episodes)
    again = cotune.blame(application(), tasks(6), runs=14, **settings)
    assert again.episodes == found.episodes and fork_count() == forks


def test_a_role_that_is_always_wrong_has_no_decisive_call(out: str) -> None:
    made = Office({"writer": 1.0})
    found = cotune.blame(application(), tasks(1), episodes="failed", out=out, responder=made, runs=80)
    assert [(one.call, one.why) for one in found.episodes] == [(None, "no single call decides")]


@pytest.mark.parametrize(
    ("call", "steps", "text"),
    [
        (None, [0], "perhaps no single call decides"),
        (0, [0], "perhaps call 0 role0"),
        (0, [0, 1], "perhaps calls 0, 1 role0, role1 (parallel)"),
    ],
)
def test_an_undecided_search_says_what_is_most_likely(
    monkeypatch: pytest.MonkeyPatch, out: str, call: int | None, steps: list[int], text: str
) -> None:
    @cotune.workflow
    async def side_by_side(task: Any) -> float:
        async with asyncio.TaskGroup() as group:
            for step in steps:
                group.create_task(ask(f"role{step}", task["word"]))
        return 0.0

    class Slow(Office):
        async def respond(self, call: LiveCall) -> Answer:
            await asyncio.sleep(0.05)  # so that the calls overlap
            return await super().respond(call)

    monkeypatch.setattr(decisive, "consider", lambda counts, rng, forkable: Decision(call, 0.6, 0))
    found = cotune.blame(side_by_side, tasks(1), episodes="failed", out=out, responder=Slow({}), runs=8)
    (lost,) = found.episodes
    assert lost.call is None and lost.why == f"{lost.forks} forks do not tell, {text}"


def test_a_single_fork_does_not_tell(out: str) -> None:
    made = Office({"writer": 1.0})
    found = cotune.blame(application(("writer",)), tasks(1), episodes="failed", out=out, responder=made, runs=3)
    (lost,) = found.episodes
    assert lost.forks == 1 and lost.why.startswith("1 fork does not tell, perhaps ")


def test_one_episode_by_its_id(out: str) -> None:
    made = Office({"writer": 0.5}, seed=1)
    first = cotune.blame(application(), tasks(6), episodes="failed", out=out, responder=made, runs=20)
    chosen = first.episodes[-1].episode
    found = cotune.blame(application(), tasks(6), episodes=chosen, out=out, responder=made, runs=20)
    assert [one.episode for one in found.episodes] == [chosen]
    with open_store(out, read_only=True) as store:
        good = next(e.id for e in store.episodes() if e.phase == "blame own" and store.rewards([e.id])[e.id]["team"])
    with pytest.raises(ConfigError, match="is not a failed run of the application as it is"):
        cotune.blame(application(), tasks(6), episodes=good, out=out, responder=made, runs=20)


def test_an_application_that_does_not_repeat_itself(out: str) -> None:
    made = Office({"writer": 1.0})
    plain = application().cotune.fn

    @cotune.workflow
    async def restless(task: Any) -> float:
        return float(await plain({**task, "word": f"{task['word']} {uuid.uuid4()}"}))

    found = cotune.blame(restless, tasks(1), episodes="failed", out=out, responder=made, runs=8)
    assert found.episodes[0].call is None
    assert any("did not repeat their episode" in note for note in found.notes)


def test_the_limit_ends_the_forks(out: str) -> None:
    made = Office({"writer": 0.5}, seed=1)
    found = cotune.blame(application(), tasks(4), episodes="failed", out=out, responder=made, runs=30, max_calls=40)
    assert "max_calls = 40" in found.ended
    assert found.calls == made.asked.total() <= 40


def test_forks_of_a_model_on_this_machine_draw_anew(out: str, tiny_base: Path, in_thread: None) -> None:
    task = {"id": "t", "word": "never said"}
    model = {"model": str(tiny_base), "temperature": 1.0, "max_tokens": 3}
    found = cotune.blame(application(("writer",)), [task], episodes="failed", out=out, runs=20, **model)
    assert found.episodes[0].forks >= 4
    with open_store(out, read_only=True) as store:
        forks = [episode.id for episode in store.episodes() if episode.phase.endswith("fork")]
        answers = {store.calls(fork)[0].candidates[0].text for fork in forks}
    assert len(forks) >= 4 and len(answers) > 1


def test_success_says_which_runs_failed(out: str) -> None:
    made = Office({"writer": 1.0})
    plain = application(("writer",)).cotune.fn

    def reporting(success: bool) -> Any:
        @cotune.workflow
        async def solve(task: Any) -> Any:
            await plain(task)
            return {"quality": 0.2 if success else 0.9, "success": success}

        return solve

    found = cotune.blame(reporting(False), tasks(1), episodes="failed", out=out, responder=made, runs=4)
    assert len(found.episodes) == 1
    found = cotune.blame(reporting(True), tasks(1), episodes="failed", out=f"{out}-2", responder=made, runs=4)
    assert not found.episodes
    assert "No run failed, so there is no episode to look at." in found.notes


def test_forks_that_cannot_reach_the_model_are_counted(out: str) -> None:
    made = Office({"writer": 1.0})

    def down_after_the_runs() -> None:
        made.down = {"small"} if made.asked.total() >= 5 else set()

    made.before = down_after_the_runs
    found = cotune.blame(application(("writer",)), tasks(1), episodes="failed", out=out, responder=made, runs=6)
    assert [(one.call, one.why) for one in found.episodes] == [(None, "no fork came to an outcome")]
    assert any("2 forks without a known outcome left out. First error: " in note for note in found.notes)


@pytest.fixture
def traced(tmp_path: Path) -> tuple[str, Any, Office]:
    """Records of an application that errs, with the application and its models."""
    app, made = application(), Office({"writer": 0.35}, seed=4)
    with open_store(tmp_path / "traced") as store:
        for task in as_tasks(tasks(10)):
            run_sync(run_episode(workflow_of(app), task, sink=store, responder=made, options=EpisodeOptions()))
    return str(tmp_path / "traced"), app, made


def failed_in(records: str) -> dict[str, str]:
    """By task, the id of its failed episode."""
    with open_store(records, read_only=True) as store:
        return {one.task.id: one.id for one in store.episodes() if not store.rewards([one.id])[one.id]["team"]}


def test_recorded_failures_are_forked_in_place_of_tasks(traced: tuple[str, Any, Office], out: str) -> None:
    records, app, made = traced
    failed = failed_in(records)
    assert 1 < len(failed) < 10
    before = made.asked.total()
    # One episode at a time, so that the models draw their errors in the same order each time.
    found = cotune.blame(app, episodes=records, out=out, responder=made, runs=30, concurrency=1)
    assert found.tasks == len(failed) and found.outcome is None
    # The recorded calls were made by somebody else.
    assert found.calls == made.asked.total() - before
    assert found.luck is not None and 0 < found.luck.mean < 1
    assert {one.episode for one in found.episodes} <= set(failed.values())
    decisive = [one for one in found.episodes if one.call is not None]
    assert len(decisive) >= 2
    assert all([one.call] == wrong_calls(out, one.episode) for one in decisive)
    assert render_text(found).splitlines()[1].endswith("the rest fail again.")
    # The analysis needs the records no more than once, and its runs are not made again.
    asked = made.asked.total()
    again = cotune.blame(app, episodes=records, out=out, responder=made, runs=30)
    assert again.luck == found.luck and made.asked.total() - asked < found.calls / 4
    # Another limit of tasks is no other analysis; runs of the application itself are one.
    cotune.blame(app, episodes=records, out=out, responder=made, runs=30, limit=1)
    with pytest.raises(ConfigError, match="holds an analysis with from_records = True, not False"):
        cotune.blame(app, tasks(3), episodes="failed", out=out, responder=made, runs=30)


def test_records_without_a_failure_are_refused(tmp_path: Path, out: str) -> None:
    made = Office({})
    with open_store(tmp_path / "traced") as store:
        (task,) = as_tasks(tasks(1))
        run_sync(run_episode(workflow_of(application()), task, sink=store, responder=made, options=EpisodeOptions()))
    with pytest.raises(
        ConfigError, match="has 1 episode of the unchanged application with a known end, and none failed"
    ):
        cotune.blame(application(), episodes=str(tmp_path / "traced"), out=out, responder=made)


def write_failure(records: Path, id: str, **fields: Any) -> None:
    """Store a failed episode with one call of the writer."""
    with open_store(records) as store:
        error = fields.pop("error_of_call", None)
        call = CallRecord(
            id=f"{id}-0",
            episode=id,
            role="writer",
            step=0,
            turn=0,
            messages=(),
            model="small",
            started=0.0,
            latency=1.0,
            status="error" if error else "ok",
            error=error,
        )
        task = Task(id=f"task of {id}", input={"word": "apple"})
        store.write([call, Episode(id=id, task=task, workflow="office", calls=1, **fields)])
        store.write([RewardRecord(id, "team", 0.0)])


def test_only_unchanged_runs_of_the_application_count_as_its_failures(tmp_path: Path) -> None:
    records = tmp_path / "records"
    for id, fields in {
        "traced": {"phase": "trace"},
        "trained": {"phase": "train"},
        "own": {"phase": "blame own"},
        "evaluated-today": {"phase": "eval-today"},
        "judge": {"phase": "judge"},
        "check": {"phase": "check"},
        "swapped": {"phase": "blame only writer"},
        "all-swapped": {"phase": "blame all"},
        "evaluated-base": {"phase": "eval-base"},
        "candidate": {"phase": "prompts", "prompts": "edited"},
        "branch": {"phase": "train", "fork": Fork("traced", "traced-0", "branch-0")},
        "diverged": {"phase": "blame-fork"},
    }.items():
        write_failure(records, id, **fields)
    with open_store(records, read_only=True) as store:
        failed, cut_off = failed_tasks(store)
    assert {one.id for one in failed.values()} == {"traced", "trained", "own", "evaluated-today"}
    assert cut_off == 0


def test_recorded_runs_that_were_cut_off_are_counted_and_not_analysed(tmp_path: Path) -> None:
    records = tmp_path / "records"
    write_failure(records, "failed")
    write_failure(records, "stopped", status="cancelled")
    write_failure(records, "refused", error_of_call=f"A call of 'writer' was {AT_LIMIT} = 3.")
    drawn = tasks_to_analyse(None, BlameOptions(episodes=str(records)))
    assert (drawn.recorded, drawn.cut_off) == (["failed"], 2)


def test_runs_that_the_limit_cut_off_have_no_decisive_call(out: str) -> None:
    made = Office({"writer": 0.0})

    @cotune.workflow
    async def forgiving(task: Any) -> float:
        for role in ("planner", "writer", "writer", "writer"):
            try:
                await ask(role, task["word"])
            except openai.APIError:
                return 0.0
            if made.asked.total() == 1:  # so that longer runs than the first one seem to fit
                return 1.0
        return 1.0

    found = cotune.blame(forgiving, tasks(4), episodes="failed", out=out, responder=made, runs=4, max_calls=4)
    assert found.left_out["limit"] > 0 and not found.episodes
    with open_store(out, read_only=True) as store:
        refused = next(one.id for one in store.episodes() if one.status == "error")
    with pytest.raises(ConfigError, match="did not run to its end, because of a limit"):
        cotune.blame(forgiving, tasks(4), episodes=refused, out=out, responder=made, runs=4)
    # With room for all calls nothing fails, and the earlier runs are counted.
    again = cotune.blame(forgiving, tasks(4), episodes="failed", out=out, responder=made, runs=4)
    assert not again.episodes
    assert any("ended early, at a limit or an interruption" in note for note in again.notes)


def test_tasks_and_recorded_episodes_exclude_each_other(traced: tuple[str, Any, Office], out: str) -> None:
    records, app, _ = traced
    with pytest.raises(ConfigError, match="cannot be used with recorded episodes: their tasks are analysed"):
        cotune.blame(app, tasks(3), episodes=records, out=out)
    with pytest.raises(ConfigError, match=r"tasks is missing.*--episodes runs/traced"):
        cotune.blame(app, episodes="no-such-folder", out=out)
    with pytest.raises(ConfigError, match="cannot be used with a reference"):
        cotune.blame(app, episodes=records, references=("openai:good",), out=out)


def test_it_is_a_question_of_its_own() -> None:
    with pytest.raises(ConfigError, match="cannot be used with a reference"):
        cotune.blame(application(), tasks(1), episodes="failed", without=("writer",))
