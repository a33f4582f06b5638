"""Episodes: run a workflow on one task, record it, and turn its outcome into rewards."""

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
from cotune.runtime.cancellation import await_cancellable
from cotune.runtime.default_threads import grow_threads
from cotune.runtime.loop_watch import REMEDY, Blocked, interruptible, watched
from cotune.runtime.user_code import Stopped, context_value, error_origin, error_phrase, in_thread, user_code
from cotune.sampling.scoring import components, split_feedback
from cotune.user_objects import remedy_of

_BUSY = re.compile(r"(?<!event loop )is (?:already|currently) running")
"""The error text of frameworks when a crew or team is started a second time while it runs."""
UNSEEN = (
    "Call models through the OpenAI SDK or a framework that cotune records, inside the workflow function. Give any "
    "other client, such as httpx, the address of `with cotune.gateway()`, also in other processes. Look also for an "
    "exception that the application swallows before it calls."
)
"""The remedy for a workflow whose calls cotune does not see."""
_SHARED = (
    "Several episodes run at the same time: create the crew or team in the workflow function, or pass it to "
    "cotune.workflow."
)
_CANCELLED = (
    "Look for a task's cancel(), a cancellation token, a time limit or an event loop in the application. "
    "If it is meant to be cancelled, catch CancelledError in the workflow function and return an outcome."
)
_LONGEST = 1000
"""Maximum length of an error's text, in characters. Of a longer text, only the first half of this is shown."""


@dataclass(frozen=True)
class Outcome:
    """The result of an episode. `error` is set if it failed; a failed episode has no rewards.

    `live.failures` counts its failed calls, including calls whose error the application swallowed.
    """

    episode: Episode
    rewards: Mapping[str, float]
    error: CotuneError | None
    live: LiveEpisode
    unknown: Collection[str] = ()
    """Names of rewards for which the workflow returned None: their values are unknown."""


@dataclass(frozen=True, kw_only=True)
class EpisodeOptions:
    """The purpose of an episode, and its limits."""

    phase: str = "trace"
    training_step: int | None = None
    rollout: int = 0
    timeout: float | None = None
    """Seconds. After a time-out, the thread of a sync workflow cannot be stopped, but its open calls are cancelled and
    further calls refused. An async workflow or scorer that blocks its event loop for this time is interrupted."""
    max_calls: int | None = None
    """Maximum number of calls. A further call ends the episode as a failure of the policy."""
    offline: bool = False
    """Whether a call that the responder leaves to the provider is refused."""
    fixed_embeddings: bool = False
    """Whether requests for embeddings are answered with fixed vectors, and counted, instead of sent to a provider."""
    parts: Parts | None = None
    """Collects the parts of the application that run."""
    record_tools: bool = False
    """Whether results of a framework's tools are recorded. Results of functions under `cotune.recorded` always are."""
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
    """Run `workflow` on `task` and record it. Errors of the workflow are in the outcome, not raised.

    `responder` answers the calls instead of the application's provider. Cancelling records the episode as cancelled.
    Raises ConfigError if clock, uuid and random cannot be recorded.
    """
    # Hook the frameworks, and begin the episode. A roles function may ask which functions started the task of a call.
    for prepare in (*hooks.activators, *hooks.starters):
        prepare()
    if options.freeze:
        start_freezing()
    carry_context(remember_starters=workflow.roles is not None)
    live = live_episode(workflow, task, sink, options, responder)
    live.loop = asyncio.get_running_loop()
    live.tape.frameworks = options.record_tools
    live.chance = Chance() if options.freeze else None

    # Run the workflow, read its outcome, and end the episode.
    try:
        async with asyncio.timeout(options.timeout) as limit:
            live.stop_soon = functools.partial(live.loop.call_soon_threadsafe, _end_now, limit)
            with watched(limit, options.timeout):
                value = await _run(workflow, task, live)
        source = f"The workflow {workflow.name!r}"
        value, text = split_feedback(value, source)
        if live.fatal is not None:  # an error that the application has swallowed
            raise live.fatal
        # A workflow whose rewards come from comparisons may return None.
        if value is None and workflow.compares:
            rewards: dict[str, float] = {}
            metrics: dict[str, float] = {}
        else:
            rewards, metrics = outcome_of(value, source)
    except asyncio.CancelledError as error:
        this_task = asyncio.current_task()
        # `cancelling` counts cancel() calls from outside, for example by Ctrl-C. Without one, the workflow raised it.
        if this_task is None or not this_task.cancelling():  # the application cancelled itself
            return _end_failed(live, _workflow_error(workflow, error))
        live.interrupted = True
        live.end("cancelled", error="cancelled")
        raise
    except TimeoutError as error:
        if limit.expired():
            live.interrupted = True
            return _end_failed(live, _timed_out(workflow, live, options.timeout, error))
        return _end_failed(live, _workflow_error(workflow, error))
    except CotuneError as error:
        return _end_failed(live, error)
    except Exception as error:  # noqa: BLE001
        return _end_failed(live, _workflow_error(workflow, error))
    episode = live.end("ok", rewards=rewards, metrics=metrics, feedback=text)
    return Outcome(episode, rewards, error=None, live=live, unknown=_unknown_rewards(value))


def _end_now(limit: asyncio.Timeout) -> None:
    """Let the time limit of an episode expire."""
    with contextlib.suppress(RuntimeError):  # the episode has ended meanwhile
        limit.reschedule(asyncio.get_running_loop().time())


def live_episode(
    workflow: Workflow, task: Task, sink: Sink, options: EpisodeOptions, responder: Responder | None = None
) -> LiveEpisode:
    """A new episode of a workflow, which begins now."""
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


def _unknown_rewards(value: Any) -> list[str]:
    """Names of the rewards that a workflow returned as None."""
    if not isinstance(value, Mapping):
        return []
    if value.keys() == {"success"} and value["success"] is None:
        return ["team"]  # `success` alone is also the reward `team`
    names_of_metrics = ("metrics", "success")
    return [name for name, number in value.items() if number is None and name not in names_of_metrics]


def outcome_of(value: Any, source: str) -> tuple[dict[str, float], dict[str, float]]:
    """Rewards and metrics from the value that a workflow returned.

    A number is the reward `team`; a bool is also the metric `success`. In a dict, every entry is a named reward, except
    `success` (a metric; without other rewards also the reward `team`) and `metrics` (a dict of metrics). An entry of
    None is unknown and left out. Raises WorkflowError for None itself, an empty dict, NaN and anything that is not a
    number.
    """
    if not isinstance(value, Mapping):
        if not isinstance(value, Real) and not hasattr(value, "__float__"):
            raise WorkflowError(
                f"{source} returned {value!r}, which is not a reward.",
                'Return a number, a bool, or a dict of named numbers. If nobody knows the outcome, return {"team": '
                "None}: then the episode is not trained on.",
            )
        rewards = components(value, source, "team", may_be_unknown=True)
        return rewards, ({"success": rewards["team"]} if _is_bool(value) else {})

    # Take the metrics out of the dict: the entries that remain are the rewards.
    named_rewards = {name: number for name, number in value.items() if number is not None}
    has_unknown = len(named_rewards) < len(value)
    metrics: dict[str, float] = {}
    named_metrics = named_rewards.pop("metrics", None)
    if named_metrics:
        metrics = components(named_metrics, source)
    if "success" in named_rewards:
        metrics |= components({"success": named_rewards.pop("success")}, source, may_be_unknown=True)

    if not named_rewards and "success" in metrics:
        named_rewards = {"team": metrics["success"]}  # success is the only outcome, so it is also the reward
    if not named_rewards and has_unknown:  # all rewards are unknown now and may arrive later
        return {}, metrics
    return components(named_rewards, source, may_be_unknown=True), metrics


def _is_bool(value: Any) -> bool:
    """Whether a value is a bool from Python, NumPy or torch."""
    kind = getattr(value, "dtype", None)
    return isinstance(value, bool) or getattr(kind, "kind", "") == "b" or str(kind) == "torch.bool"


async def _run(workflow: Workflow, task: Task, live: LiveEpisode) -> Any:
    """Run the workflow on a task as the episode `live`, and return its value. An async function runs on this loop, a
    sync one in a thread."""
    grow_threads(asyncio.get_running_loop())
    with recording(live), context_value(user_code, f"The workflow {workflow.name!r} on task {task.id!r}"):
        if inspect.iscoroutinefunction(workflow.fn):
            return await _run_stoppable(interruptible(workflow.fn(task.input)), live)
        value = await in_thread(workflow.fn, task.input)
        # A sync function may return an awaitable, for example a lambda around an async function.
        if inspect.isawaitable(value):
            return await _run_stoppable(interruptible(value), live)
        return value


async def _run_stoppable(work: Awaitable[Any], live: LiveEpisode) -> Any:
    """Await `work`, the workflow. If this is cancelled from outside, stop the episode's calls before the workflow is
    cancelled: a framework may wait for them before it ends."""

    def stop_calls() -> None:
        live.interrupted = True
        live.stop()

    return await await_cancellable(work, stop_calls)


def _timed_out(workflow: Workflow, live: LiveEpisode, timeout: float | None, error: TimeoutError) -> WorkflowError:
    """The error of an episode that took too long, with its open calls and the place in the code."""
    cause = f"The workflow {workflow.name!r} did not finish within {timeout} seconds"
    details = "; ".join([*live.pending(), *getattr(error.__cause__, "__notes__", ())])
    if details:
        cause += f": {details}"
    return WorkflowError(f"{cause}.", "Find the slow part, or raise the episode's time-out.")


def _end_failed(live: LiveEpisode, error: CotuneError) -> Outcome:
    """End the episode with an error, and blame the infrastructure or the policy for it. The caller shows and raises the
    error, so it is redacted like the record."""
    blamed: FailureCause = "infrastructure" if live.outage else failure_cause(error, live.outages)
    if isinstance(live.fatal, TooManyCalls):  # the application may have raised something else for the refused call
        error = live.fatal
        blamed = "policy"
    if live.redaction is not None:
        error = live.redaction.error(error)
    episode = live.end("error", error=str(error), blame=blamed)
    return Outcome(episode, rewards={}, error=error, live=live)


def _workflow_error(workflow: Workflow, error: BaseException) -> WorkflowError:
    """The error of an episode whose workflow raised `error`. It has the text of `error`, the line of the user's code
    that raised it, and a remedy, which names the mistake if the text is known to come from a common one.
    """
    # The workflow blocked its event loop until its time-out, and was interrupted.
    if isinstance(error.__cause__, Blocked):
        return WorkflowError(f"The workflow {workflow.name!r} {error.__cause__}.", REMEDY)
    if isinstance(error, Stopped):  # it stands for an exception that must not leave the application's code
        text = str(error)
        raised = error.__cause__
    else:
        text = error_phrase(error)
        raised = error
    if isinstance(raised, asyncio.CancelledError):
        remedy = _CANCELLED
    elif _BUSY.search(text):  # a crew or team is used by two episodes at the same time
        remedy = _SHARED
    else:
        remedy = remedy_of(text, "Fix the workflow.")
    if len(text) > _LONGEST:  # some libraries put every prompt and answer into the text of an error
        text = f"{text[: _LONGEST // 2]} ... ({len(text):,} characters)"
    failed = WorkflowError(f"The workflow {workflow.name!r} raised {text}{error_origin(error)}.", remedy)
    failed.__cause__ = error
    return failed
