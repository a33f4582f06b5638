"""Scoring: calls the user's scorers and turns what they return into named reward components."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cotune.context import current_episode
from cotune.errors import WorkflowError
from cotune.recorder import LiveCall
from cotune.records import Candidate

Scorer = Callable[..., Any]


def components(value: Any, source: str, name: str = "local") -> dict[str, float]:
    """Named components of what a scorer or workflow returned; a plain number becomes `{name: number}`.

    Raises WorkflowError for None, NaN, infinities and anything that is not a number.
    """
    items = value.items() if isinstance(value, Mapping) else [(name, value)]
    named: dict[str, float] = {}
    for key, number in items:
        try:
            named[str(key)] = float(number)
        except (TypeError, ValueError):
            raise WorkflowError(
                f"{source} returned {key} = {number!r}, which is not a number.",
                "Return a number, a bool, or a dict of named numbers.",
            ) from None
        if not math.isfinite(named[str(key)]):
            raise WorkflowError(f"{source} returned {key} = {number!r}.", "Return finite numbers only.")
    if not named:
        raise WorkflowError(f"{source} returned an empty dict.", "Return at least one named number.")
    return named


async def score(
    scorer: Scorer, candidates: Sequence[Candidate], call: LiveCall, role: str
) -> tuple[dict[str, float], ...]:
    """Score every candidate; a sync scorer runs in a thread so that it never blocks the loop.

    The scorer's own LLM calls are not part of the episode. Raises WorkflowError when a scorer raises or returns
    something that is no reward.
    """
    source = f"The scorer of role {role!r}"
    task = call.task.input
    context = contextvars.copy_context()
    context.run(current_episode.set, None)
    try:
        if inspect.iscoroutinefunction(scorer):
            tasks = [asyncio.create_task(scorer(c, call, task), context=context.copy()) for c in candidates]
            values = await asyncio.gather(*tasks)
        else:
            loop = asyncio.get_running_loop()
            values = await loop.run_in_executor(None, context.run, lambda: [scorer(c, call, task) for c in candidates])
    except WorkflowError:
        raise
    except Exception as error:
        raise WorkflowError(f"{source} raised {type(error).__name__}: {error}.", "Fix the scorer.") from error
    return tuple(components(value, source) for value in values)
