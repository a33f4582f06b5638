"""`cotune train --profile`: a trace of one step by torch's profiler."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from cotune.errors import error_line
from cotune.storage.checkpoints import checkpoint_name
from cotune.trainer.reporting.progress import Progress
from cotune.trainer.run.run import Run


@contextlib.asynccontextmanager
async def profiling(run: Run, progress: Progress) -> AsyncIterator[None]:
    """Trace the step within the block, if it is the one to profile, and print the path of the trace.

    If the profiler fails, the run continues. A step that is not completed has no trace.
    """
    number = run.state.steps + 1
    if number != run.profile_step:
        yield
        return
    trace = run.folder.profiles / f"{checkpoint_name(number)}.trace.json.gz"
    progress.say(f"step {number} is profiled ...")
    fault = await _profiler_fault(run.learner.begin_profile)
    try:
        yield
    except Exception:
        # Only the error of the step is reported. Its learner may be gone.
        with contextlib.suppress(Exception):
            run.learner.end_profile(None)
        raise
    is_completed = run.state.steps >= number
    if not fault:
        # Without a file, the profiler discards its trace.
        fault = await _profiler_fault(run.learner.end_profile, trace if is_completed else None)
    if fault:
        progress.say(f"step {number} has no profile: {fault}")
    elif is_completed:
        progress.say(f"trace of step {number}, for https://ui.perfetto.dev or chrome://tracing: {trace}")


async def _profiler_fault(method: Callable[..., None], *arguments: Any) -> str:
    """Call a method of the learner. Returns the error of its profiler in one line; an empty text without one."""
    try:
        await asyncio.to_thread(method, *arguments)
    except (RuntimeError, OSError) as error:
        return error_line(error)
    return ""
