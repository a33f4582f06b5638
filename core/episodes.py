"""Episodes: runs a workflow on one task with recording on, and turns its outcome into rewards."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import traceback
import weakref
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from numbers import Real
from typing import Any

from cotune.errors import CotuneError, WorkflowError
from cotune.parts import Parts
from cotune.recorder import LiveEpisode, Responder, Sink
from cotune.records import Episode, Task
from cotune.scoring import components
from cotune.threads import carry_context
from cotune.workflow import Workflow

activators: list[Callable[[], None]] = []
"""Run before every episode, cheaply: what installs the integrations."""

_THREADS = 1024
_executors: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, ThreadPoolExecutor] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Outcome:
    """How an episode ended. `error` is set when it failed; a failed episode has no rewards.

    Calls that failed within it, also those whose failure the application swallowed, are in `live.failures`.
    """

    episode: Episode
    rewards: Mapping[str, float]
    error: CotuneError | None
    live: LiveEpisode


async def run_episode(
    workflow: Workflow,
    task: Task,
    *,
    sink: Sink,
    responder: Responder | None = None,
    phase: str = "trace",
    training_step: int | None = None,
    rollout: int = 0,
    timeout: float | None = None,
    offline: bool = False,
    parts: Parts | None = None,
) -> Outcome:
    """Run `workflow` on `task` and record it; errors of the workflow are in the outcome, not raised.

    `responder` answers the calls in place of the application's provider. A sync workflow runs in a thread: at
    `timeout` (seconds) the thread cannot be stopped, but its open calls are cancelled and further ones refused.
    Cancelling records the episode as cancelled. `offline` refuses what the responder leaves to the provider. `parts`
    is told what the application is made of.
    """
    for activate in activators:
        activate()
    carry_context()
    live = LiveEpisode(
        sink,
        task,
        workflow=workflow.name,
        responder=responder,
        loop=asyncio.get_running_loop(),
        phase=phase,
        training_step=training_step,
        rollout=rollout,
        offline=offline,
        redactors=tuple(workflow.redactors),
        keep_token_ids=workflow.keep_token_ids,
        parts=parts,
    )
    try:
        async with asyncio.timeout(timeout) as limit:
            value = await _run(workflow.fn, task.input, live)
        if live.fatal is not None:
            raise live.fatal
        rewards, metrics = outcome_of(value, f"The workflow {workflow.name!r}")
    except asyncio.CancelledError as error:
        task_here = asyncio.current_task()
        if task_here is None or not task_here.cancelling():
            return _failed(live, _raised(workflow, error))
        live.end("cancelled", error="cancelled")
        raise
    except TimeoutError as error:
        if limit.expired():
            message = f"The workflow {workflow.name!r} did not finish within {timeout} seconds."
            return _failed(live, WorkflowError(message, "Raise the episode's time-out."))
        return _failed(live, _raised(workflow, error))
    except CotuneError as error:
        return _failed(live, error)
    except Exception as error:  # noqa: BLE001
        return _failed(live, _raised(workflow, error))
    return Outcome(live.end("ok", rewards=rewards, metrics=metrics), rewards, None, live)


def outcome_of(value: Any, source: str) -> tuple[dict[str, float], dict[str, float]]:
    """Rewards and metrics of what a workflow returned.

    A number is the reward `team`; a bool is that and the metric `success`. In a dict every entry is a named reward,
    except `success` (a metric, and the reward `team` where it stands alone) and `metrics` (a dict of metrics).
    Raises WorkflowError for None, NaN and anything that is not a number.
    """
    if not isinstance(value, Mapping):
        if not isinstance(value, Real) and not hasattr(value, "__float__"):
            raise WorkflowError(
                f"{source} returned {value!r}, which is not a reward.",
                "Return a number, a bool, or a dict of named numbers.",
            )
        rewards = components(value, source, "team")
        return rewards, ({"success": rewards["team"]} if isinstance(value, bool) else {})
    named = dict(value)
    extra = named.pop("metrics", None)
    metrics = components(extra, source) if extra else {}
    if "success" in named:
        metrics["success"] = components({"success": named.pop("success")}, source)["success"]
    if not named and "success" in metrics:
        named = {"team": metrics["success"]}
    return components(named, source), metrics


async def _run(fn: Callable[[Any], Any], task: Any, live: LiveEpisode) -> Any:
    threads = _threads()
    with live:
        if inspect.iscoroutinefunction(fn):
            return await _stoppable(fn(task), live)
        context = contextvars.copy_context()
        value = await live.loop.run_in_executor(threads, context.run, fn, task)  # type: ignore[union-attr]
        return await _stoppable(value, live) if inspect.isawaitable(value) else value


async def _stoppable(work: Awaitable[Any], live: LiveEpisode) -> Any:
    """Await the workflow; when cancelled, stop its calls first: a framework may wait for them before it gives way."""
    running = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if not running.done():
            live.stop()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        raise


def _threads() -> ThreadPoolExecutor:
    """The running loop's own pool, grown on demand: one thread per sync episode or node that really runs.

    It also becomes the loop's default where the application has set none, because frameworks run an application's sync
    nodes there, and scorers run there while they wait: asyncio's own default (a few threads per core) would lock up.
    """
    loop = asyncio.get_running_loop()
    pool = _executors.get(loop)
    if pool is None:
        pool = _executors[loop] = ThreadPoolExecutor(_THREADS, thread_name_prefix="cotune")
        default = getattr(loop, "_default_executor", None)
        if default is None or getattr(default, "_thread_name_prefix", "") == "asyncio":
            loop.set_default_executor(pool)
            if default is not None:
                default.shutdown(wait=False)
    return pool


def _failed(live: LiveEpisode, error: CotuneError) -> Outcome:
    return Outcome(live.end("error", error=str(error)), {}, error, live)


def _raised(workflow: Workflow, error: BaseException) -> WorkflowError:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    what = f"{type(error).__name__}: {error}"
    failed = WorkflowError(f"The workflow {workflow.name!r} raised {what}{where}.", "Fix the workflow.")
    failed.__cause__ = error
    return failed
