"""Scores the candidates of stored calls by the workflow's present scorers, without running the application."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from cotune.episodes.workflows import Workflow
from cotune.errors import RecordError, WorkflowError
from cotune.judging.episodes import finished_call, outcomes_of
from cotune.recording.context import Judging, judging
from cotune.recording.redaction import Redaction
from cotune.recording.rewards import reward_records
from cotune.records.ids import candidate_id
from cotune.records.structs import CallRecord, Episode, Task
from cotune.runtime.user_code import setting
from cotune.sampling.scoring import Scored, score
from cotune.storage.protocol import Store

ByTarget = Mapping[str, Scored | WorkflowError]
"""By candidate or episode id, its rewards or why it has none."""
AT_ONCE = 64
"""Calls that are scored at the same time."""
CHUNK = 256
"""Calls that are held in memory."""
EPISODES = "(episodes)"
"""In place of a role, where whole episodes are scored."""


@dataclass
class Rescored:
    """What became of the rewards of one role: sums by component over the candidates that have new ones."""

    groups: int = 0
    """Calls that were scored, or tasks whose episodes were."""
    candidates: int = 0
    failed: int = 0
    """Candidates that got none now."""
    others_best: int = 0
    """Groups of two or more in which another candidate is the best now."""
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    had: Counter[str] = field(default_factory=Counter)
    have: Counter[str] = field(default_factory=Counter)
    """Candidates that had, and have, each component."""

    def add(self, ids: Sequence[str], old: Mapping[str, Mapping[str, float]], new: ByTarget) -> None:
        """Count a group."""
        self.groups += 1
        now = {one: found.rewards for one in ids if isinstance(found := new.get(one), Scored) and found.rewards}
        self.candidates += len(now)
        self.failed += len(ids) - len(now)
        for one, rewards in now.items():
            for name, value in old.get(one, {}).items():
                self.before[name] = self.before.get(name, 0.0) + value
                self.had[name] += 1
            for name, value in rewards.items():
                self.after[name] = self.after.get(name, 0.0) + value
                self.have[name] += 1
        both = [one for one in now if old.get(one)]
        self.others_best += len(both) > 1 and _best(both, old) != _best(both, now)


@dataclass
class Rescoring:
    """Rewards before and after by role, and errors of scorers with the number of candidates that they cost."""

    roles: dict[str, Rescored] = field(default_factory=dict)
    errors: Counter[str] = field(default_factory=Counter)
    without_scorer: Counter[str] = field(default_factory=Counter)
    """Answered calls by role that has no scorer."""


async def rescore(workflow: Workflow, store: Store, *, role: str | None = None, write: bool = False) -> Rescoring:
    """Score all answered calls (of `role`), and the episodes that ended well, by the workflow's scorers and judge.

    Nothing runs but these. With `write` the rewards are stored: a component replaces that of the same name, unless its
    group was trained on, which the store counts in `refused`.
    """
    found = Rescoring()
    episodes = list(store.episodes())
    answered = _answered(store, episodes, role, workflow, found)
    while chunk := list(islice(answered, CHUNK)):
        scored = await score_calls(workflow, store, chunk)
        groups = [(call.role, [candidate_id(call.id, c.index) for c in call.candidates]) for call, _ in chunk]
        _take(found, store, groups, scored, workflow.redaction, write=write)
    if role is None and workflow.episode_judge is not None:
        for together in _steps(episodes):
            outcomes = await outcomes_of(workflow.episode_judge, store, together, redaction=workflow.redaction)
            tasks: dict[str, list[str]] = {}
            for episode in together:
                if episode.id in outcomes:
                    tasks.setdefault(episode.task.id, []).append(episode.id)
            of_tasks = [(EPISODES, ids) for ids in tasks.values()]
            _take(found, store, of_tasks, outcomes, workflow.redaction, write=write)
    return found


async def score_calls(workflow: Workflow, store: Store, calls: Iterable[tuple[CallRecord, Task]]) -> ByTarget:
    """Rewards of all candidates of those calls that were answered and whose role has a scorer."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(call: CallRecord, task: Task) -> ByTarget:
        targets = [candidate_id(call.id, candidate.index) for candidate in call.candidates]
        async with gate:
            try:
                seen = finished_call(store, call, task)
            except RecordError as error:
                return dict.fromkeys(targets, WorkflowError(error.cause, error.remedy))
            scored = await score(workflow.scorers[call.role], call.candidates, seen, call.role)
        return dict(zip(targets, scored, strict=True))

    wanted = [(call, task) for call, task in calls if scorable(workflow, call)]
    with setting(judging, Judging(redaction=workflow.redaction)):
        found = await asyncio.gather(*(one(call, task) for call, task in wanted))
    return {target: rewards for some in found for target, rewards in some.items()}


def scorable(workflow: Workflow, call: CallRecord) -> bool:
    """Whether a stored call has candidates, and its role a scorer."""
    return call.status == "ok" and bool(call.candidates) and call.role in workflow.scorers


def _answered(
    store: Store, episodes: Iterable[Episode], role: str | None, workflow: Workflow, found: Rescoring
) -> Iterator[tuple[CallRecord, Task]]:
    for episode in episodes:
        for call in store.calls(episode.id):
            if role not in (None, call.role):
                continue
            if scorable(workflow, call):
                yield call, episode.task
            elif call.status == "ok" and call.candidates:
                found.without_scorer[call.role] += 1


def _steps(episodes: Iterable[Episode]) -> Iterator[list[Episode]]:
    """Episodes that are compared with each other: those of one phase and step."""
    steps: dict[tuple[str, int | None], list[Episode]] = {}
    for episode in episodes:
        steps.setdefault((episode.phase, episode.training_step), []).append(episode)
    yield from steps.values()


def _take(
    found: Rescoring,
    store: Store,
    groups: Iterable[tuple[str, Sequence[str]]],
    scored: ByTarget,
    redaction: Redaction | None,
    *,
    write: bool,
) -> None:
    old = store.rewards(scored)
    for role, ids in groups:
        found.roles.setdefault(role, Rescored()).add(ids, old, scored)
    found.errors.update(str(error) for error in scored.values() if isinstance(error, WorkflowError))
    if write:
        new = ((target, one) for target, one in scored.items() if isinstance(one, Scored))
        store.write([record for target, one in new for record in reward_records(target, *one, redaction=redaction)])


def _best(ids: Sequence[str], rewards: Mapping[str, Mapping[str, float]]) -> str:
    return max(ids, key=lambda one: sum(rewards[one].values()))
