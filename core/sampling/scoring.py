"""Scoring: call the user's scorers, and turn their results into named reward components."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec

from cotune.errors import WorkflowError, error_text
from cotune.recording.context import current_episode
from cotune.records.structs import LARGEST_REWARD, Candidate, Task
from cotune.runtime.cancellation import await_cancellable
from cotune.runtime.loop_watch import REMEDY, Blocked, interruptible
from cotune.runtime.user_code import AppThread, Stopped, context_value, error_origin, pooled_thread, user_code

Reward = float | Mapping[str, float]
"""The result of a scorer or a workflow: a number, a bool, or named numbers."""


class Feedback(msgspec.Struct, frozen=True):
    """A reward with its reason in words. A scorer, a workflow or a judge may return it instead of a reward.

    `reward` is the value that it would return without a text. The text is recorded and shown with the reward; a text of
    more than 4,000 characters loses its middle. It is not part of any prompt, unless the training method uses it.

    ```python
    @solve.scorer("coder")
    def short(candidate, call, task):
        return cotune.Feedback(-len(candidate.text), f"{len(candidate.text)} characters: say it in fewer")
    ```
    """

    reward: Reward | Mapping[str, float | None] | None
    text: str


class Scored(NamedTuple):
    """Named reward components, which may be empty, and the text given with them."""

    rewards: dict[str, float]
    text: str = ""
    name: str = ""
    """The name of the text if there are no rewards."""


class Call(Protocol):
    """A call in the form for its scorer, before it is recorded. Messages and tools are in OpenAI form."""

    @property
    def id(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def step(self) -> int:
        """Its number among the calls of the episode, from 0."""
        ...

    @property
    def turn(self) -> int:
        """Its number among the calls of its role, from 0."""
        ...

    @property
    def messages(self) -> list[dict[str, Any]]: ...
    @property
    def tools(self) -> list[dict[str, Any]] | None: ...
    @property
    def model(self) -> str:
        """The model that the application asked for."""
        ...

    @property
    def params(self) -> dict[str, Any]:
        """The request's other parameters."""
        ...

    @property
    def parents(self) -> tuple[str, ...]:
        """Ids of the calls whose outputs the messages contain."""
        ...

    @property
    def task(self) -> Task: ...
    @property
    def state(self) -> Any:
        """Input state of the LangGraph node that makes the call, else None."""
        ...


Scorer = Callable[[Candidate, Call, Any], Reward | Feedback | Awaitable[Reward | Feedback]]
"""`(candidate, call, task)` -> reward, sync or async; `task` is the workflow's input, as `call.task.input`."""
Rewards = Sequence[Reward | Feedback | None]
GroupScorer = Callable[[Sequence[Candidate], Call, Any], Rewards | Awaitable[Rewards]]
"""`(candidates, call, task)` -> a reward for each candidate, in their order, None for a candidate without a reward."""


LONGEST = 120.0
"""Default seconds that a scorer may take for a candidate: a fifth of the time of an episode, so that a scorer that
hangs costs the candidate and not the episode."""


Bounds = tuple[float, float]
"""The lowest and the highest number that a scorer may return, as it declares."""


@dataclass(frozen=True)
class OfGroup:
    """A scorer that sees the candidates of a call together."""

    scorer: GroupScorer
    timeout: float = LONGEST
    bounds: Bounds | None = None


@dataclass(frozen=True)
class OfOne:
    """A scorer that sees one candidate at a time."""

    scorer: Scorer
    timeout: float = LONGEST
    bounds: Bounds | None = None


AnyScorer = Scorer | OfOne | OfGroup
MOST_NAMES = 256
"""Maximum number of reward components from a scorer or workflow: each is stored per candidate, and shown."""


def components(value: Any, source: str, name: str = "local", *, may_be_unknown: bool = False) -> dict[str, float]:
    """The named numbers of a reward, the value that a scorer or workflow returned. A plain number becomes
    `{name: number}`. `source` names the scorer or workflow in errors.

    Raises WorkflowError for None, NaN, infinities, numbers beyond `LARGEST_REWARD` and anything that is not a number.
    With `may_be_unknown`, the error for NaN mentions that None is allowed: callers remove it before.
    """
    items = value.items() if isinstance(value, Mapping) else [(name, value)]
    named: dict[str, float] = {}
    for key, number in items:
        try:
            if isinstance(number, str | bytes | bytearray):  # float("7") would accept an answer as its own reward
                raise TypeError
            reward = float(number)
        except (TypeError, ValueError):
            raise WorkflowError(
                f"{source} returned {key} = {number!r}, which is not a number.",
                "Return a number, a bool, or a dict of named numbers.",
            ) from None
        if not math.isfinite(reward):
            remedy = "Return finite numbers only"
            if may_be_unknown:
                remedy += f'; if it is unknown, return {{"{key}": None}}'
            raise WorkflowError(f"{source} returned {key} = {number!r}, which is not a finite number.", f"{remedy}.")
        if abs(reward) > LARGEST_REWARD:
            raise WorkflowError(
                f"{source} returned {key} = {number!r}, which the 32-bit numbers of training cannot hold.",
                f"Return numbers between -{LARGEST_REWARD:g} and {LARGEST_REWARD:g}; rewards near 1 are usual.",
            )
        named[str(key)] = reward
    if not named:
        raise WorkflowError(f"{source} returned an empty dict.", "Return at least one named number.")
    if len(named) > MOST_NAMES:
        first_names = ", ".join(list(named)[:3])
        raise WorkflowError(
            f"{source} returned {len(named)} numbers ({first_names}, ...): at most {MOST_NAMES} are allowed.",
            "Return their mean or their sum under one name.",
        )
    return named


def split_feedback(value: Any, source: str) -> tuple[Any, str]:
    """The reward and the text of a value that a scorer or workflow returned. Raises WorkflowError for feedback whose
    text is not a str."""
    if not isinstance(value, Feedback):
        return value, ""
    if not isinstance(value.text, str):
        raise WorkflowError(
            f"{source} returned Feedback with text of type {type(value.text).__name__}, which is not a str.",
            'Return Feedback(reward, text) with a str, which may be "".',
        )
    return value.reward, value.text


async def score(
    scorer: AnyScorer, candidates: Sequence[Candidate], call: Call, role: str
) -> tuple[Scored | WorkflowError, ...]:
    """Score the candidates of a call. Returns a result for each candidate: the components of its reward (named numbers)
    with their text, or the error if the scorer raised or returned no reward.

    The scorer gets all candidates together (`OfGroup`) or one at a time (`OfOne`, or a plain function without a time
    limit or bounds of its own). If a scorer of all candidates returns None for one, this one has no components. A sync
    scorer runs in a pooled thread, so that it never blocks the loop. LLM calls of the scorer are not part of the
    episode.
    """
    source = f"The scorer of role {role!r}"
    arguments = (call, call.task.input)  # after the candidate
    if isinstance(scorer, OfGroup):
        limit = scorer.timeout * len(candidates)
        results = await compare(scorer.scorer, candidates, arguments, source, call.task.id, timeout=limit)
        return tuple(_check_result_bounds(result, scorer.bounds, source) for result in results)
    if not isinstance(scorer, OfOne):
        scorer = OfOne(scorer)
    fn = scorer.scorer

    def score_one(candidate: Candidate) -> Coroutine[Any, Any, Any]:
        """The value that the scorer returns for a candidate, or the exception that it raises."""
        return _call_function(fn, (candidate, *arguments), scorer.timeout, source)

    with context_value(current_episode, None), context_value(user_code, f"{source} on task {call.task.id!r}"):
        if inspect.iscoroutinefunction(fn):
            values: list[Any] = await asyncio.gather(*map(score_one, candidates), return_exceptions=True)
        else:
            # One after another, so that a call never takes more than one thread of the shared pool.
            values = [await score_one(candidate) for candidate in candidates]
    results = tuple(_scored(value, source) for value in values)
    return tuple(_check_result_bounds(result, scorer.bounds, source) for result in results)


def _check_result_bounds(result: Scored | WorkflowError, bounds: Bounds | None, source: str) -> Scored | WorkflowError:
    """The result of a scorer, or an error in its place if a number is outside the bounds that the scorer declares."""
    if bounds is None or isinstance(result, WorkflowError):
        return result
    low, high = bounds
    for name, number in result.rewards.items():
        if not low <= number <= high:
            return WorkflowError(
                f"{source} returned {name} = {number!r}, outside of its bounds, {low:g} to {high:g}.",
                "Return numbers within them, or declare others: @workflow.scorer(role, bounds=(LOW, HIGH)).",
            )
    return result


async def compare(
    fn: Callable[..., Any],
    items: Sequence[Any],
    arguments: Sequence[Any],
    source: str,
    task_id: str,
    name: str = "local",
    timeout: float | None = None,
) -> tuple[Scored | WorkflowError, ...]:
    """The reward of each of `items` (candidates or episodes) from a function that gets all of them, or the error if it
    raised.

    `fn` is called with the items and then the `arguments`. If it returns None for an item, this item has no components.
    `name` is the name of a reward that is a plain number. `source` names the function in messages, and `timeout` is in
    seconds.
    """
    with context_value(current_episode, None), context_value(user_code, f"{source} on task {task_id!r}"):
        returned = await _call_function(fn, (tuple(items), *arguments), timeout, source)

    # An error of the function is the error of each item.
    remedy = "Return a list with one reward for each, in their order."
    values: list[Any] = []
    error: Exception | None = None
    if isinstance(returned, Exception):
        error = returned
    elif isinstance(returned, str | bytes | Mapping) or not isinstance(returned, Iterable):
        fault = f"{source} returned {type(returned).__name__}, not one reward for each of {len(items)}."
        error = WorkflowError(fault, remedy)
    else:
        values = list(returned)
        if len(values) != len(items):
            error = WorkflowError(f"{source} returned {len(values)} rewards for {len(items)}.", remedy)
    if error is not None:
        values = [error] * len(items)
    return tuple(_scored(value, source, name, may_be_none=True) for value in values)


async def _call_function(fn: Callable[..., Any], args: Sequence[Any], timeout: float | None, source: str) -> Any:
    """Call the application's function. Returns its value, or the exception that it raises, or the error that it did not
    return within `timeout` seconds. An async function runs on this loop, a sync one in a thread of the pool."""
    call_method = getattr(fn, "__call__", None)  # noqa: B004  # of an object whose class defines it
    is_async = inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(call_method)
    thread_or_none: AbstractAsyncContextManager[AppThread | None] = nullcontext() if is_async else pooled_thread()
    try:
        # The time-out begins inside: it does not include waiting for a thread.
        async with thread_or_none as thread, asyncio.timeout(timeout) as limit:
            if thread is None:
                value = fn(*args)
            else:
                value = await thread.run(fn, *args)
            # A sync function may return an awaitable, for example a lambda around an async function.
            if inspect.isawaitable(value):
                value = await await_cancellable(interruptible(value))
            return value
    except Exception as error:  # noqa: BLE001
        is_time_limit = isinstance(error, TimeoutError) and limit.expired()
        if not is_time_limit:
            return error  # raised by the function, which may raise a TimeoutError of its own
        cause = f"{source} did not finish within {timeout:g} seconds"
        # The cancellation of a function in a thread has a note that says where the thread is (`AppThread.run`).
        notes = getattr(error.__cause__, "__notes__", ())
        if notes:
            cause += f": {'; '.join(notes)}"
        timed_out = WorkflowError(
            f"{cause}.", "Find the slow part, or allow more time: .scorer(role, timeout=SECONDS)."
        )
        timed_out.__cause__ = error
        return timed_out


def _scored(value: Any, source: str, name: str = "local", *, may_be_none: bool = False) -> Scored | WorkflowError:
    """The named rewards and the text in `value`, which a scorer returned or raised. An error for an exception, and for
    a value that is no reward.

    `name` is the name of a reward that is a plain number. With `may_be_none`, None is a result without rewards. A value
    such as KeyboardInterrupt is raised again.
    """
    if isinstance(value, Exception):
        return _scorer_failure(value, source)
    if isinstance(value, BaseException):
        raise value
    try:
        reward, text = split_feedback(value, source)
        if reward is None and may_be_none:
            return Scored({}, text)
        return Scored(components(reward, source, name), text)
    except WorkflowError as error:
        return error


def _scorer_failure(error: Exception, source: str) -> WorkflowError:
    """The error to report for a scorer that raised `error`, or that was interrupted because it blocked the loop."""
    if isinstance(error, WorkflowError):
        return error
    if isinstance(error, Stopped) and isinstance(error.__cause__, Blocked):
        failure = WorkflowError(f"{source} {error.__cause__}.", REMEDY)
    elif isinstance(error, Stopped):  # its text already describes the exception that it stands for
        failure = WorkflowError(f"{source} raised {error}{error_origin(error)}.", "Fix the scorer.")
    else:
        failure = WorkflowError(f"{source} raised {error_text(error)}{error_origin(error)}.", "Fix the scorer.")
    failure.__cause__ = error
    return failure
