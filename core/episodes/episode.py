"""Episodes: runs a workflow on one task with recording on, and turns its outcome into rewards."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import re
from collections.abc import Awaitable, Collection, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from cotune.episodes.workflows import Workflow
from cotune.errors import CotuneError, TooManyCalls, WorkflowError
from cotune.recording.app_parts import Parts
from cotune.recording.carrying import carry_context
from cotune.recording.chance import Chance, start_freezing
from cotune.recording.context import recording
from cotune.recording.hooks import hooks
from cotune.recording.recorder import LiveEpisode, Responder, Sink
from cotune.records.failure_cause import FailureCause, failure_cause
from cotune.records.structs import Episode, Task
from cotune.runtime.default_threads import grow_threads
from cotune.runtime.loop_watch import REMEDY, Blocked, interruptible, watched
from cotune.runtime.user_code import Stopped, in_thread, origin, phrase, setting, user_code
from cotune.sampling.scoring import components, parted
from cotune.user_objects import remedy_of

_BUSY = re.compile(r"(?<!event loop )is (?:already|currently) running")
"""What frameworks say of a crew or team that is asked to run twice at once."""
UNSEEN = (
    "Call models through the OpenAI SDK or a framework that cotune records, inside the workflow function. Give any "
    "other client, such as httpx, the address of `with cotune.gateway()`, also in other processes. Look also for an "
    "exception that the application swallows before it calls."
)
"""What to do where no call of a workflow is seen."""
_SHARED = "Several episodes run at once: make the crew or team in the workflow function, or give it to cotune.workflow."
_CANCELLED = (
    "Look for a task's cancel(), a cancellation token, a time limit or a loop of the application's own. "
    "Where it is meant to be cancelled, catch CancelledError in the workflow function and return an outcome."
)
_LONGEST = 1000
"""Characters of an error's text above which only the first half of as many is shown."""


@dataclass(frozen=True)
class Outcome:
    """How an episode ended. `error` is set when it failed; a failed episode has no rewards.

    Calls that failed within it, also those whose failure the application swallowed, are in `live.failures`.
    """

    episode: Episode
    rewards: Mapping[str, float]
    error: CotuneError | None
    live: LiveEpisode
    unknown: Collection[str] = ()
    """Names of the rewards that it would have, if anybody knew them."""


@dataclass(frozen=True, kw_only=True)
class EpisodeOptions:
    """What an episode is run for, and within which bounds."""

    phase: str = "trace"
    training_step: int | None = None
    rollout: int = 0
    timeout: float | None = None
    """Seconds. The thread of a sync workflow cannot be stopped then, but its open calls are cancelled and further ones
    refused. An async one that blocks its event loop for that long is interrupted, and so is an async scorer."""
    max_calls: int | None = None
    """Calls after which the episode is ended, as a failure of the policy."""
    offline: bool = False
    """Whether a call that the responder leaves to the provider is refused."""
    fixed_embeddings: bool = False
    """Whether requests for embeddings are answered with fixed vectors, and counted, instead of going to a provider."""
    parts: Parts | None = None
    """Collects the parts of the application that run."""
    record_tools: bool = False
    """Whether results of a framework's tools are recorded, as those of functions under `cotune.recorded` always are."""
    freeze: bool = False
    """Whether the values of clock, uuid and random are recorded."""


async def run_episode(
    workflow: Workflow,
    task: Task,
    *,
    sink: Sink,
    responder: Responder | None = None,
    options: EpisodeOptions = EpisodeOptions(),
) -> Outcome:
    """Run `workflow` on `task` and record it; errors of the workflow are in the outcome, not raised.

    `responder` answers the calls in place of the application's provider. Cancelling records the episode as cancelled.
    Raises ConfigError where clock, uuid and random cannot be recorded.
    """
    for start in (*hooks.activators, *hooks.starters):
        start()
    if options.freeze:
        start_freezing()
    carry_context(callers=workflow.roles is not None)
    live = live_episode(workflow, task, sink, options, responder)
    live.loop = asyncio.get_running_loop()
    live.tape.frameworks = options.record_tools
    live.chance = Chance() if options.freeze else None
    try:
        async with asyncio.timeout(options.timeout) as limit:
            live.stop_soon = functools.partial(live.loop.call_soon_threadsafe, _end_now, limit)
            with watched(limit, options.timeout):
                value = await _run(workflow, task, live)
        source = f"The workflow {workflow.name!r}"
        value, text = parted(value, source)
        if live.fatal is not None:
            raise live.fatal
        nothing = value is None and workflow.compares
        rewards, metrics = outcome_of({} if nothing else value, source, some=not nothing)
    except asyncio.CancelledError as error:
        task_here = asyncio.current_task()
        if task_here is None or not task_here.cancelling():
            return _failed(live, _raised(workflow, error))
        live.interrupted = True
        live.end("cancelled", error="cancelled")
        raise
    except TimeoutError as error:
        if limit.expired():
            live.interrupted = True
            return _failed(live, _timed_out(workflow, live, options.timeout, error))
        return _failed(live, _raised(workflow, error))
    except CotuneError as error:
        return _failed(live, error)
    except Exception as error:  # noqa: BLE001
        return _failed(live, _raised(workflow, error))
    episode = live.end("ok", rewards=rewards, metrics=metrics, feedback=text)
    return Outcome(episode, rewards, None, live, _unknown(value))


def _end_now(limit: asyncio.Timeout) -> None:
    """Let the time limit of an episode expire."""
    with contextlib.suppress(RuntimeError):  # the episode has ended meanwhile
        limit.reschedule(asyncio.get_running_loop().time())


def live_episode(
    workflow: Workflow, task: Task, sink: Sink, options: EpisodeOptions, responder: Responder | None = None
) -> LiveEpisode:
    """An episode of a workflow that begins now."""
    return LiveEpisode(
        sink,
        task,
        workflow=workflow.name,
        responder=responder,
        phase=options.phase,
        training_step=options.training_step,
        rollout=options.rollout,
        offline=options.offline,
        fixed_embeddings=options.fixed_embeddings,
        redactors=tuple(workflow.redactors),
        keep_token_ids=workflow.keep_token_ids,
        parts=options.parts,
        roles=workflow.roles,
        prompts=workflow.prompts,
        max_calls=options.max_calls,
    )


def _unknown(value: Any) -> list[str]:
    named = value if isinstance(value, Mapping) else {}
    names = [name for name, number in named.items() if number is None and name != "metrics"]
    return ["team"] if list(named) == names == ["success"] else [name for name in names if name != "success"]


def outcome_of(value: Any, source: str, *, some: bool = True) -> tuple[dict[str, float], dict[str, float]]:
    """Rewards and metrics of the value that a workflow returned.

    A number is the reward `team`; a bool is that and the metric `success`. In a dict every entry is a named reward,
    except `success` (a metric, and the reward `team` where it stands alone) and `metrics` (a dict of metrics). An entry
    that is None is not known, and left out. With `some` there must be an entry. Raises WorkflowError for None itself,
    NaN and anything that is not a number.
    """
    if not isinstance(value, Mapping):
        if not isinstance(value, Real) and not hasattr(value, "__float__"):
            raise WorkflowError(
                f"{source} returned {value!r}, which is not a reward.",
                "Return a number, a bool, or a dict of named numbers; where nobody knows the outcome, "
                '{"team": None}: such an episode teaches nothing.',
            )
        rewards = components(value, source, "team", may_be_unknown=True)
        return rewards, ({"success": rewards["team"]} if _is_bool(value) else {})
    named = {name: number for name, number in value.items() if number is not None}
    some = some and len(named) == len(value)
    extra = named.pop("metrics", None)
    metrics = components(extra, source) if extra else {}
    if "success" in named:
        metrics |= components({"success": named.pop("success")}, source, may_be_unknown=True)
    if not named and "success" in metrics:
        named = {"team": metrics["success"]}
    return (components(named, source, may_be_unknown=True) if named or some else {}), metrics


def _is_bool(value: Any) -> bool:
    """Whether a value is a bool of Python, NumPy or torch."""
    kind = getattr(value, "dtype", None)
    return isinstance(value, bool) or getattr(kind, "kind", "") == "b" or str(kind) == "torch.bool"


async def _run(workflow: Workflow, task: Task, live: LiveEpisode) -> Any:
    grow_threads(asyncio.get_running_loop())
    with recording(live), setting(user_code, f"The workflow {workflow.name!r} on task {task.id!r}"):
        if inspect.iscoroutinefunction(workflow.fn):
            return await _stoppable(interruptible(workflow.fn(task.input)), live)
        value = await in_thread(workflow.fn, task.input)
        return await _stoppable(interruptible(value), live) if inspect.isawaitable(value) else value


async def _stoppable(work: Awaitable[Any], live: LiveEpisode) -> Any:
    """Await the workflow; when cancelled, stop its calls first: a framework may wait for them before it gives way."""
    own: list[asyncio.CancelledError] = []

    async def kept() -> Any:
        try:
            return await work
        except asyncio.CancelledError as error:  # a task's end loses its text and where it was raised
            own.append(error)
            raise

    running = asyncio.ensure_future(kept())
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if not running.done():
            live.interrupted = True
            live.stop()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        elif own:
            raise own[0] from None
        raise


def _timed_out(workflow: Workflow, live: LiveEpisode, timeout: float | None, error: TimeoutError) -> WorkflowError:
    at = "; ".join([*live.pending(), *getattr(error.__cause__, "__notes__", ())])
    cause = f"The workflow {workflow.name!r} did not finish within {timeout} seconds{': ' if at else ''}{at}."
    return WorkflowError(cause, "Look at what takes so long, or raise the episode's time-out.")


def _failed(live: LiveEpisode, error: CotuneError) -> Outcome:
    """The error is shown and raised by whoever ran the episode, so it goes through the redactors as the record does."""
    blamed: FailureCause = "infrastructure" if live.outage else failure_cause(error, live.outages)
    if isinstance(live.fatal, TooManyCalls):  # whatever the application made of the refused call
        error, blamed = live.fatal, "policy"
    if live.redaction is not None:
        error = live.redaction.error(error)
    return Outcome(live.end("error", error=str(error), blame=blamed), {}, error, live)


def _raised(workflow: Workflow, error: BaseException) -> WorkflowError:
    if isinstance(error.__cause__, Blocked):
        return WorkflowError(f"The workflow {workflow.name!r} {error.__cause__}.", REMEDY)
    what = str(error) if isinstance(error, Stopped) else phrase(error)
    remedy = _SHARED if _BUSY.search(what) else remedy_of(what, "Fix the workflow.")
    if isinstance(error.__cause__ if isinstance(error, Stopped) else error, asyncio.CancelledError):
        remedy = _CANCELLED
    if len(what) > _LONGEST:  # some libraries put every prompt and answer into the text of an error
        what = f"{what[: _LONGEST // 2]} ... ({len(what):,} characters)"
    failed = WorkflowError(f"The workflow {workflow.name!r} raised {what}{origin(error)}.", remedy)
    failed.__cause__ = error
    return failed
