"""The runs of a dry run: each task once, and again with other answers while parts of the application are idle."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from cotune.recording.app_parts import Part, Parts
from cotune.recording.episodes import EpisodeOptions, Outcome, run_episode
from cotune.recording.records import CallRecord, Task
from cotune.sampling.stub import StubResponder
from cotune.storage.protocol import Store
from cotune.workflows import Workflow

RUNS = 4
"""Most runs of a task."""
_SECONDS = 20.0
"""After which no further run begins."""


@dataclasses.dataclass(frozen=True)
class Runs:
    """What was run. `seen` are the calls of one run of each task (the first that ended well), and calls of other runs
    by roles that it has not; `idle` the parts of the application that never called."""

    outcomes: Sequence[Outcome]
    seen: Sequence[CallRecord]
    idle: Sequence[tuple[Part, bool]]
    """Each with whether it ran all the same."""


async def run_tasks(
    workflow: Workflow, tasks: Sequence[Task], store: Store, stub: Callable[[int], StubResponder], timeout: float
) -> Runs:
    """Run `workflow` on each task; `stub(n)` answers the run `n`. No run takes longer than `timeout` seconds."""
    parts, outcomes, seen = Parts(), [], []
    for task in tasks:
        found = await _run_task(workflow, task, store, stub, timeout, parts)
        outcomes += found
        seen += _calls(found, store)
    called = [f"{call.role}/" for call in seen]
    idle = [part for part in parts.known if not any(role.startswith(f"{part.role}/") for role in called)]
    return Runs(outcomes, seen, [(part, parts.ran(part)) for part in idle])


async def _run_task(
    workflow: Workflow,
    task: Task,
    store: Store,
    stub: Callable[[int], StubResponder],
    timeout: float,
    parts: Parts,
) -> list[Outcome]:
    outcomes: list[Outcome] = []
    began, branched, ways = time.perf_counter(), False, False
    for run in range(RUNS):
        left = _SECONDS - (time.perf_counter() - began)
        again = (branched and run == 1) or ((branched or ways) and _unfinished(outcomes, parts))
        if run and not (again and left > 0):
            break
        answers = stub(run)
        options = EpisodeOptions(phase="check", timeout=timeout, offline=True, parts=parts)
        outcome = await run_episode(workflow, task, sink=store, responder=answers, options=options)
        # A framework wraps what was raised into its own error, traceback and all; the cause says it better.
        outcomes.append(dataclasses.replace(outcome, error=outcome.live.fatal or outcome.error))
        store.flush()
        branched, ways = branched or answers.branched, ways or answers.ways
        timeout = min(timeout, max(_SECONDS, left))
    return outcomes


def _unfinished(outcomes: Sequence[Outcome], parts: Parts) -> bool:
    """Whether another run may show what none has: an end without an error, or a part that has not run."""
    return all(outcome.error for outcome in outcomes) or not all(parts.ran(part) for part in parts.known)


def _calls(outcomes: Sequence[Outcome], store: Store) -> list[CallRecord]:
    shown = next((outcome for outcome in outcomes if outcome.error is None), outcomes[0])
    calls = list(store.calls(shown.episode.id))
    for outcome in outcomes:
        roles = {call.role for call in calls}
        calls += [call for call in store.calls(outcome.episode.id) if call.role not in roles]
    return calls
