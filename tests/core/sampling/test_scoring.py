"""Scoring: what scorers return becomes named components; what is no reward is an error that says so."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from cotune.errors import WorkflowError
from cotune.recording.context import current_episode
from cotune.records.structs import Candidate, Task
from cotune.runtime import user_code
from cotune.sampling.scoring import Feedback, OfGroup, OfOne, Scored, components, score

CANDIDATES = [Candidate(index=i, text=text, message={}) for i, text in enumerate(("a", "bb"))]
CALL = SimpleNamespace(task=Task(id="t", input={"goal": 2}))


def first_line(fn):
    return f"{__file__}:{fn.__code__.co_firstlineno + 1} in {fn.__name__}"


def scored(scorer):
    """What the scorer gave each candidate: its rewards, or the error."""
    found = asyncio.run(score(scorer, CANDIDATES, CALL, "writer"))
    return tuple(one if isinstance(one, WorkflowError) else one.rewards for one in found)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (0.5, {"local": 0.5}),
        (True, {"local": 1.0}),
        (np.float32(0.25), {"local": 0.25}),
        ({"team": 1, "style": -0.5}, {"team": 1.0, "style": -0.5}),
    ],
)
def test_components(value, named):
    assert components(value, "it") == named


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        (None, "it returned local = None, which is not a number."),
        ("good", "it returned local = 'good', which is not a number."),
        ("0.5", "it returned local = '0.5', which is not a number."),
        (b"3", "it returned local = b'3', which is not a number."),
        ([1.0], "it returned local = [1.0], which is not a number."),
        (float("nan"), "it returned local = nan, which is not a finite number."),
        (float("-inf"), "it returned local = -inf, which is not a finite number."),
        ({"team": None}, "it returned team = None, which is not a number."),
        ({}, "it returned an empty dict."),
    ],
)
def test_what_is_no_reward(value, cause):
    with pytest.raises(WorkflowError) as caught:
        components(value, "it")
    assert caught.value.cause == cause
    assert caught.value.remedy.startswith("Return ")


def test_sync_scorer_runs_beside_the_loop():
    seen = []

    def scorer(candidate, call, task):
        seen.append((candidate.text, call is CALL, task, threading.current_thread() is threading.main_thread()))
        return len(candidate.text) / task["goal"]

    assert scored(scorer) == ({"local": 0.5}, {"local": 1.0})
    assert seen == [("a", True, {"goal": 2}, False), ("bb", True, {"goal": 2}, False)]


def test_async_scorers_overlap():
    async def main():
        both = asyncio.Barrier(2)

        async def scorer(candidate, call, task):
            await both.wait()
            return {"team": candidate.index}

        return await asyncio.wait_for(score(scorer, CANDIDATES, CALL, "writer"), 60)

    assert asyncio.run(main()) == (Scored({"team": 0.0}), Scored({"team": 1.0}))


def test_an_async_scorer_behind_a_plain_function_is_awaited():
    async def asynchronous(candidate, call, task):
        await asyncio.sleep(0)
        return len(candidate.text)

    assert scored(lambda *args: asynchronous(*args)) == ({"local": 1.0}, {"local": 2.0})


@pytest.mark.parametrize("is_async", [False, True])
def test_calls_of_a_scorer_are_not_part_of_the_episode(is_async):
    def sync(candidate, call, task):
        return current_episode.get() is None

    async def asynchronous(candidate, call, task):
        return current_episode.get() is None

    async def main():
        token = current_episode.set(object())
        try:
            return await score(asynchronous if is_async else sync, CANDIDATES, CALL, "writer")
        finally:
            current_episode.reset(token)

    assert asyncio.run(main()) == (Scored({"local": 1.0}), Scored({"local": 1.0}))


@pytest.mark.parametrize("is_async", [False, True])
def test_a_scorer_that_raises(is_async):
    def sync(candidate, call, task):
        raise KeyError("answer")

    async def asynchronous(candidate, call, task):
        raise KeyError("answer")

    for error in scored(asynchronous if is_async else sync):
        assert isinstance(error, WorkflowError)
        where = first_line(asynchronous if is_async else sync)
        assert error.cause == f"The scorer of role 'writer' raised KeyError: 'answer' ({where})."
        assert error.remedy == "Fix the scorer."
        assert isinstance(error.__cause__, KeyError)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_candidate_that_breaks_the_scorer_costs_itself(is_async):
    def sync(candidate, call, task):
        return 1 / (candidate.index - 1)

    async def asynchronous(candidate, call, task):
        return sync(candidate, call, task)

    first, second = scored(asynchronous if is_async else sync)
    assert first == {"local": -1.0}
    assert (
        second.cause == f"The scorer of role 'writer' raised ZeroDivisionError: division by zero ({first_line(sync)})."
    )


def test_a_scorer_that_forgets_to_return():
    for error in scored(lambda candidate, call, task: None):
        assert error.cause == "The scorer of role 'writer' returned local = None, which is not a number."


@pytest.mark.parametrize("is_async", [False, True])
def test_a_scorer_of_the_group_sees_all_candidates_in_one_call(is_async):
    seen = []

    def sync(candidates, call, task):
        seen.append(([c.text for c in candidates], call is CALL, task, current_episode.get()))
        longest = max(len(c.text) for c in candidates)
        return [len(candidates[0].text) / longest, {"best": True, "style": -0.5}]

    async def asynchronous(candidates, call, task):
        return sync(candidates, call, task)

    assert scored(OfGroup(asynchronous if is_async else sync)) == ({"local": 0.5}, {"best": 1.0, "style": -0.5})
    assert seen == [(["a", "bb"], True, {"goal": 2}, None)]


def test_an_object_that_is_called_asynchronously_scores_a_group():
    class Panel:
        async def __call__(self, candidates, call, task):
            return np.arange(len(candidates), dtype=np.float32)

    assert scored(OfGroup(Panel())) == ({"local": 0.0}, {"local": 1.0})


def test_a_candidate_that_the_group_gives_no_reward_has_none():
    assert scored(OfGroup(lambda candidates, call, task: (None, 0.25))) == ({}, {"local": 0.25})


def test_a_number_outside_of_the_declared_bounds_is_the_scorers_fault():
    def one(candidate, call, task):
        return {"style": 0.0, "length": float(len(candidate.text))}

    def group(candidates, call, task):
        return [one(candidate, call, task) for candidate in candidates]

    assert scored(OfOne(one, bounds=(0.0, 2.0))) == scored(OfOne(one))
    for scorer in (OfOne(one, bounds=(0.0, 1.0)), OfGroup(group, bounds=(0.0, 1.0))):
        inside, outside = scored(scorer)
        assert inside == {"style": 0.0, "length": 1.0}
        assert outside.cause == "The scorer of role 'writer' returned length = 2.0, outside of its bounds, 0 to 1."
        assert outside.remedy.startswith("Return numbers within them, or declare others")


@pytest.mark.parametrize(
    ("value", "causes"),
    [
        ([1.0], ["returned 1 rewards for 2."] * 2),
        (0.5, ["returned float, not one reward for each of 2."] * 2),
        ({"local": 1.0}, ["returned dict, not one reward for each of 2."] * 2),
        ("ab", ["returned str, not one reward for each of 2."] * 2),
        ([1.0, "good"], [None, "returned local = 'good', which is not a number."]),
    ],
)
def test_what_is_no_reward_of_a_group(value, causes):
    found = scored(OfGroup(lambda candidates, call, task: value))
    prefix = "The scorer of role 'writer' "
    assert [f.cause.removeprefix(prefix) if isinstance(f, WorkflowError) else None for f in found] == causes


def test_a_scorer_of_the_group_that_raises_costs_all_its_candidates():
    def scorer(candidates, call, task):
        raise KeyError("answer")

    cause = f"The scorer of role 'writer' raised KeyError: 'answer' ({first_line(scorer)})."
    assert [f.cause for f in scored(OfGroup(scorer))] == [cause] * 2


@pytest.mark.parametrize("is_async", [True, False])
def test_a_scorer_that_hangs_costs_its_candidate_and_no_other(is_async):
    released = threading.Event()

    async def waits(candidate, call, task):
        await asyncio.sleep(60 if candidate.text == "a" else 0)
        return 1.0

    def blocks(candidate, call, task):
        if candidate.text == "a":
            released.wait(60)
        return 1.0

    lost, kept = scored(OfOne(waits if is_async else blocks, 0.5))
    released.set()
    assert kept == {"local": 1.0}
    assert lost.cause.startswith("The scorer of role 'writer' did not finish within 0.5 seconds")
    assert ("its thread goes on at" in lost.cause) is not is_async
    assert lost.remedy.endswith("or allow more time: .scorer(role, timeout=SECONDS).")


def test_a_scorer_of_the_group_has_its_time_for_each_candidate():
    async def waits(candidates, call, task):
        await asyncio.sleep(0.5)
        return [1.0, 0.0]

    assert scored(OfGroup(waits, 5.0)) == ({"local": 1.0}, {"local": 0.0})
    (cause,) = {f.cause for f in scored(OfGroup(waits, 0.1))}
    assert cause.startswith("The scorer of role 'writer' did not finish within 0.2 seconds: it waits at")
    assert cause.endswith("in waits: await asyncio.sleep(0.5).")


def test_a_time_out_of_the_scorers_own_stays_its_own():
    async def scorer(candidate, call, task):
        raise TimeoutError("the service is slow")

    assert all("raised TimeoutError: the service is slow" in f.cause for f in scored(OfOne(scorer, 5.0)))


def test_a_cancellation_within_a_scorer_costs_the_candidate_and_one_of_the_call_ends_it():
    async def waits_for_what_is_cancelled(candidate, call, task):
        if candidate.index:
            inner = asyncio.ensure_future(asyncio.sleep(60))
            inner.cancel()
            await inner
        return 1.0

    first, second = scored(waits_for_what_is_cancelled)
    assert first == {"local": 1.0}
    assert second.cause.startswith("The scorer of role 'writer' raised CancelledError")

    async def judge(candidates, call, task):
        await waits_for_what_is_cancelled(candidates[-1], call, task)

    assert all("CancelledError" in error.cause for error in scored(OfGroup(judge)))

    async def cancelled_from_outside():
        async def slow(candidate, call, task):
            await asyncio.sleep(60)

        asked = asyncio.create_task(score(slow, CANDIDATES, CALL, "writer"))
        await asyncio.sleep(0.01)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked

    asyncio.run(cancelled_from_outside())


@pytest.mark.parametrize("value", [1.1e38, -1e300, {"cost": 2e38}])
def test_rewards_that_training_cannot_hold_are_refused_by_name(value):
    name = "cost" if isinstance(value, dict) else "local"
    with pytest.raises(WorkflowError, match=rf"The scorer of role 'a' returned {name} = .*32-bit numbers") as caught:
        components(value, "The scorer of role 'a'")
    assert "between -1e+38 and 1e+38" in caught.value.remedy
    assert components(1e38, "it") == {"local": 1e38}


def test_sync_scorers_share_threads_and_see_the_callers_context():
    threads, seen = set(), set()
    who = contextvars.ContextVar("who", default="nobody")

    def scorer(candidate, call, task):
        threads.add(threading.current_thread())
        seen.add(who.get())
        return 1.0

    async def main():
        for number in range(20):
            who.set(f"call {number}")
            await score(scorer, CANDIDATES, CALL, "writer")

    asyncio.run(main())
    assert len(threads) == 1 and seen == {f"call {number}" for number in range(20)}


def test_a_thread_whose_scorer_hangs_is_given_up_and_replaced(monkeypatch):
    monkeypatch.setattr(user_code, "MOST_THREADS", 1)
    released = threading.Event()
    threads = {}

    def scorer(candidate, call, task):
        threads[candidate.text] = threading.current_thread()
        if candidate.text == "a":
            released.wait(60)
        return 1.0

    lost, kept = scored(OfOne(scorer, 0.5))
    assert "its thread goes on at" in lost.cause and kept == {"local": 1.0}
    assert threads["a"] is not threads["bb"]
    released.set()
    threads["a"].join(60)
    assert not threads["a"].is_alive(), "a thread that was given up ends with its function"


def test_waiting_for_a_thread_is_not_the_scorers_time(monkeypatch):
    monkeypatch.setattr(user_code, "MOST_THREADS", 1)
    running, most = [0], [0]

    def scorer(candidate, call, task):
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.3)
        running[0] -= 1
        return 1.0

    async def main():
        return await asyncio.gather(*(score(OfOne(scorer, 2.0), CANDIDATES, CALL, "writer") for _ in range(4)))

    both = (Scored({"local": 1.0}), Scored({"local": 1.0}))
    assert asyncio.run(main()) == [both] * 4, "2.4 seconds in all, one after the other"

    assert most == [1]


NOTED = [Feedback(0.25, "  names no source\n"), Feedback({"form": 1, "right": True}, "")]


@pytest.mark.parametrize("kind", ["sync", "async", "group", "async group"])
def test_a_scorer_may_say_why(kind):
    def sync(candidate, call, task):
        return NOTED[candidate.index]

    async def asynchronous(candidate, call, task):
        return NOTED[candidate.index]

    def group(candidates, call, task):
        return iter([NOTED[0], Feedback(None, "too long to judge")])

    async def async_group(candidates, call, task):
        return group(candidates, call, task)

    scorers = {"sync": sync, "async": asynchronous, "group": OfGroup(group), "async group": OfGroup(async_group)}
    second = Scored({}, "too long to judge") if "group" in kind else Scored({"form": 1.0, "right": 1.0}, "")
    found = asyncio.run(score(scorers[kind], CANDIDATES, CALL, "writer"))
    assert found == (Scored({"local": 0.25}, "  names no source\n"), second)


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        (Feedback(1.0, 3), "returned Feedback with text of type int, which is not a str."),
        (Feedback(1.0, None), "returned Feedback with text of type NoneType, which is not a str."),
        (Feedback(float("nan"), "why"), "returned local = nan, which is not a finite number."),
        (Feedback(None, "why"), "returned local = None, which is not a number."),
        (Feedback({}, "why"), "returned an empty dict."),
        (Feedback(Feedback(1.0, "a"), "b"), "returned local = Feedback(reward=1.0, text='a'), which is not a number."),
        ({"team": Feedback(1.0, "a")}, "returned team = Feedback(reward=1.0, text='a'), which is not a number."),
    ],
)
def test_feedback_that_is_none(value, cause):
    for error in scored(lambda candidate, call, task: value):
        assert error.cause == f"The scorer of role 'writer' {cause}" and error.remedy


def test_feedback_of_a_scorer_that_hangs_or_fails_for_one_candidate():
    def scorer(candidate, call, task):
        if candidate.text == "a":
            raise ValueError("no network")
        return Feedback(1.0, "fine")

    async def hangs(candidate, call, task):
        await asyncio.sleep(60 if candidate.text == "a" else 0)
        return Feedback(1.0, "fine")

    for one in (scorer, OfOne(hangs, 0.2)):
        lost, kept = asyncio.run(score(one, CANDIDATES, CALL, "writer"))
        assert isinstance(lost, WorkflowError) and kept == Scored({"local": 1.0}, "fine")
