"""Texts beside rewards: recorded with them, redacted, cut, and part of no prompt."""

from __future__ import annotations

import asyncio

import pytest

import cotune
from cotune.episodes.episode import EpisodeOptions, run_episode
from cotune.episodes.rescore import rescore
from cotune.episodes.workflows import workflow_of
from cotune.judging.episodes import judge_episodes
from cotune.recording.call_records import CallerContext
from cotune.recording.context import current_episode, judging
from cotune.recording.redaction import FAILED
from cotune.recording.rewards import LONGEST_FEEDBACK, feedback_record
from cotune.records.answers import Answer
from cotune.records.structs import Candidate, Task
from cotune.storage.sqlite_store import SqliteStore


@pytest.fixture
def store(tmp_path):
    with SqliteStore.open(tmp_path) as made:
        yield made


def run(flow, store):
    flow = workflow_of(flow)
    outcome = asyncio.run(run_episode(flow, Task(id="t", input={}), sink=store, options=EpisodeOptions()))
    store.flush()
    return outcome


def ask(feedback=(), text="yes"):
    """A call of the episode that runs here, with two candidates."""
    call = current_episode.get().start(
        CallerContext("writer", "test"), {"messages": [{"role": "user", "content": "?"}]}
    )
    candidates = tuple(Candidate(index=i, text=text, message={"role": "assistant", "content": text}) for i in (0, 1))
    call.finish(Answer(candidates=candidates, rewards=({"form": 0.5, "right": 0.0}, {}), feedback=feedback))


@pytest.mark.parametrize(
    ("value", "rewards", "texts"),
    [
        (cotune.Feedback(0.5, "half"), {"team": 0.5}, {"team": "half"}),
        (cotune.Feedback(True, " solved \n"), {"team": 1.0}, {"team": "solved"}),
        (cotune.Feedback({"right": 1, "short": 0}, "too long"), {"right": 1.0, "short": 0.0}, {"right": "too long"}),
        (cotune.Feedback({"success": False}, "no answer"), {"team": 0.0}, {"team": "no answer"}),
        (cotune.Feedback({"team": None}, "cannot be told"), {}, {"team": "cannot be told"}),
        (cotune.Feedback(0.5, ""), {"team": 0.5}, {}),
        (cotune.Feedback(0.5, " \n\t"), {"team": 0.5}, {}),
        (cotune.Feedback(0.5, "lone \ud83d surrogate"), {"team": 0.5}, {"team": "lone \\ud83d surrogate"}),
    ],
)
def test_the_outcome_of_a_workflow_may_have_a_text(store, value, rewards, texts):
    @cotune.workflow
    def solve(task):
        return value

    @cotune.workflow
    async def asynchronous(task):
        return value

    for flow in (solve, asynchronous):
        outcome = run(flow, store)
        id = outcome.episode.id
        assert (outcome.error, dict(outcome.rewards), store.health.lost) == (None, rewards, 0)
        assert (store.rewards([id])[id], store.feedback([id])[id]) == (rewards, texts)


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        (cotune.Feedback(None, "why"), "returned None, which is not a reward"),
        (cotune.Feedback(float("nan"), "why"), "returned team = nan"),
        (cotune.Feedback(1.0, b"why"), "returned Feedback with text of type bytes"),
    ],
)
def test_an_outcome_that_is_none_fails_the_episode_and_leaves_no_text(store, value, cause):
    @cotune.workflow
    def solve(task):
        return value

    outcome = run(solve, store)
    assert cause in outcome.error.cause and outcome.episode.status == "error"
    assert store.feedback([outcome.episode.id]) == {outcome.episode.id: {}}


def test_texts_of_candidates_are_recorded_with_the_call_even_where_the_episode_fails(store):
    @cotune.workflow
    def solve(task):
        ask(("misses the point", "says nothing"))
        raise ValueError("broken")

    outcome = run(solve, store)
    (call,) = store.calls(outcome.episode.id)
    assert store.feedback([f"{call.id}.0", f"{call.id}.1"]) == {
        f"{call.id}.0": {"form": "misses the point"},
        f"{call.id}.1": {"local": "says nothing"},
    }


def test_a_long_text_loses_its_middle_and_is_counted(store):
    text = "a" * LONGEST_FEEDBACK + "b" * 1500

    @cotune.workflow
    def solve(task):
        ask((text, "short"))
        return cotune.Feedback(1.0, "x" * LONGEST_FEEDBACK)

    outcome = run(solve, store)
    (call,) = store.calls(outcome.episode.id)
    kept = store.feedback([f"{call.id}.0"])[f"{call.id}.0"]["form"]
    assert kept == "a" * 2000 + "\n[... 1,500 characters cut ...]\n" + "a" * 500 + "b" * 1500
    assert store.feedback([outcome.episode.id])[outcome.episode.id]["team"] == "x" * LONGEST_FEEDBACK
    assert store.figures().cut_feedback() == 1


def test_a_text_that_was_cut_and_exported_is_not_cut_again():
    first = feedback_record("e", "team", "x" * (LONGEST_FEEDBACK + 1500), 1.0)
    assert feedback_record("e", "team", first.text, 1.0) == first


def test_texts_are_redacted_before_they_are_cut(store):
    secret = "x" * (LONGEST_FEEDBACK // 2 - 4) + "1234 5678" + "y" * LONGEST_FEEDBACK

    @cotune.workflow
    def solve(task):
        ask((secret, ""))
        return cotune.Feedback(1.0, "card 1234 5678")

    @solve.redactor
    def hide(message):
        seen.append(message["role"])
        return {**message, "content": str(message["content"]).replace("1234 5678", "[card]")}

    seen = []
    outcome = run(solve, store)
    (call,) = store.calls(outcome.episode.id)
    assert store.feedback([outcome.episode.id])[outcome.episode.id] == {"team": "card [card]"}
    assert "1234" not in store.feedback([f"{call.id}.0"])[f"{call.id}.0"]["form"]
    assert seen.count("feedback") == 2

    solve.cotune.redactors[:] = [lambda message: 1 / 0]
    outcome = run(solve, store)
    assert store.feedback([outcome.episode.id])[outcome.episode.id] == {"team": FAILED}


@pytest.mark.parametrize("content", [None, "", " "])
def test_a_text_that_a_redactor_leaves_out_is_not_stored(store, content):
    @cotune.workflow
    def solve(task):
        ask(("card 1234", ""))
        return cotune.Feedback(1.0, "card 1234")

    solve.redactor(lambda message: {**message, "content": content})
    id = run(solve, store).episode.id
    (call,) = store.calls(id)
    assert store.feedback([id, f"{call.id}.0"]) == {id: {}, f"{call.id}.0": {}}

    @cotune.workflow
    def breaks(task):
        raise ValueError("card 1234")

    breaks.redactor(lambda message: {**message, "content": content})
    assert run(breaks, store).episode.error == content


def test_a_text_with_a_lone_surrogate_is_redacted_as_it_is_stored(store):
    @cotune.workflow
    def solve(task):
        return cotune.Feedback(1.0, "1234 \ud83d")

    solve.redactor(lambda message: {**message, "content": str(message["content"]).replace("1234", "[card]")})
    id = run(solve, store).episode.id
    assert store.feedback([id]) == {id: {"team": "[card] \\ud83d"}}


def test_a_judge_of_episodes_and_scorers_of_records_say_why(store):
    seen = []

    @cotune.workflow
    def solve(task):
        ask()
        return cotune.Feedback({"team": None}, "the workflow's own")

    @solve.judge
    def judge(episodes, task):
        seen.append(judging.get().redaction)
        return [cotune.Feedback({"style": 0.5}, "polite, to 1234")] * len(episodes)

    @solve.scorer("writer")
    def brief(candidate, call, task):
        seen.append(judging.get().redaction)
        return cotune.Feedback(1.0, "brief, to 1234") if candidate.index else 0.25

    @solve.redactor
    def hide(message):
        return {**message, "content": str(message["content"]).replace("1234", "[card]")}

    flow = solve.cotune
    id = run(solve, store).episode.id
    seen.clear()
    asyncio.run(judge_episodes(judge, store, store.episodes(), redaction=flow.redaction))
    assert store.feedback([id])[id] == {"team": "the workflow's own", "style": "polite, to [card]"}
    (call,) = store.calls(id)

    before = store.feedback([f"{call.id}.1"])
    asyncio.run(rescore(flow, store))
    assert store.feedback([f"{call.id}.1"]) == before, "nothing is stored without write"
    assert [redaction and redaction.redactors for redaction in seen] == [[hide]] * 4, "a judge redacts what it keeps"
    asyncio.run(rescore(flow, store, write=True))
    store.flush()
    assert store.feedback([f"{call.id}.0", f"{call.id}.1"]) == {
        f"{call.id}.0": {},
        f"{call.id}.1": {"local": "brief, to [card]"},
    }
    solve.cotune.scorers["writer"] = lambda candidate, call, task: 0.0
    asyncio.run(rescore(flow, store, write=True))
    store.flush()
    assert store.feedback([f"{call.id}.1"]) == {f"{call.id}.1": {}}, "the text went with its reward"


@pytest.mark.parametrize(("other", "name"), [(None, "by_style"), ({"style": 1.0}, "style")])
def test_the_text_of_a_judge_that_gives_no_reward_has_the_name_of_its_rewards(store, other, name):
    @cotune.workflow
    def solve(task):
        return cotune.Feedback(0.5, "half")

    @solve.judge
    def by_style(episodes, task):
        return [cotune.Feedback(None, "cannot be compared"), other]

    id, _ = [run(solve, store).episode.id for _ in range(2)]
    asyncio.run(judge_episodes(by_style, store, store.episodes()))
    assert store.rewards([id])[id] == {"team": 0.5}
    assert store.feedback([id])[id] == {"team": "half", name: "cannot be compared"}


def test_a_redactor_that_fails_outside_of_an_episode_is_logged_once(store, caplog):
    @cotune.workflow
    def solve(task):
        ask()
        return 1.0

    @solve.scorer("writer")
    def brief(candidate, call, task):
        return cotune.Feedback(1.0, f"{candidate.index}")

    class OddError(Exception):
        pass

    @solve.redactor
    def redact(message):
        if message["role"] == "feedback":
            raise OddError
        return message

    id = run(solve, store).episode.id
    asyncio.run(rescore(solve.cotune, store, write=True))
    store.flush()
    (call,) = store.calls(id)
    assert store.feedback([f"{call.id}.1"]) == {f"{call.id}.1": {"local": FAILED}}
    said = "A message of role 'feedback' is stored as [redaction failed]: the redactor raised OddError."
    assert [record.getMessage() for record in caplog.records] == [said]


@pytest.mark.parametrize("path", [None, "records.db"])
def test_a_trace_takes_a_text_too(tmp_path, path):
    with cotune.trace(path and tmp_path / path, task="t") as trace:
        trace.reward(cotune.Feedback(0.5, "half of it"), style=1.0)
    assert (trace.rewards, trace.feedback) == ({"team": 0.5, "style": 1.0}, {"team": "half of it"})
    trace.reward(cotune.Feedback({"right": 1.0}, "right"))
    trace.reward(0.75)
    assert (trace.rewards["team"], trace.feedback) == (0.75, {"right": "right"})
