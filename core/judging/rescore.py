"""Scoring what was recorded, without running anything: candidates of stored calls, by the scorers of today."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from cotune.errors import RecordError, WorkflowError
from cotune.judging.episodes import finished_call
from cotune.recording.records import Call, Task, candidate_id
from cotune.sampling.scoring import score
from cotune.storage.protocol import Store
from cotune.workflows import Workflow

Scored = Mapping[str, dict[str, float] | WorkflowError]
"""By candidate id, its rewards or why it has none."""
AT_ONCE = 64
"""Calls that are scored at the same time."""


async def score_calls(workflow: Workflow, store: Store, calls: Iterable[tuple[Call, Task]]) -> Scored:
    """Rewards of all candidates of those calls that were answered and whose role has a scorer."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(call: Call, task: Task) -> Scored:
        async with gate:
            return await _score_call(workflow, store, call, task)

    wanted = [(call, task) for call, task in calls if scorable(workflow, call)]
    found = await asyncio.gather(*(one(call, task) for call, task in wanted))
    return {target: rewards for some in found for target, rewards in some.items()}


def scorable(workflow: Workflow, call: Call) -> bool:
    """Whether a stored call has candidates, and its role a scorer."""
    return call.status == "ok" and bool(call.candidates) and call.role in workflow.scorers


async def _score_call(workflow: Workflow, store: Store, call: Call, task: Task) -> Scored:
    targets = [candidate_id(call.id, candidate.index) for candidate in call.candidates]
    try:
        seen = finished_call(store, call, task)
    except RecordError as error:
        return dict.fromkeys(targets, WorkflowError(error.cause, error.remedy))
    scored = await score(workflow.scorers[call.role], call.candidates, seen, call.role)
    return dict(zip(targets, scored, strict=True))
