"""Score the candidates of stored calls with the workflow's present scorers, without running the application."""

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
from cotune.records.structs import CallRecord, Episode, Record, Task
from cotune.runtime.user_code import context_value
from cotune.sampling.scoring import Scored, score
from cotune.storage.protocol import Store

ByTarget = Mapping[str, Scored | WorkflowError]
"""The rewards of each candidate or episode, by id, or the error if it has none."""
AT_ONCE = 64
"""Number of calls that are scored at the same time."""
CHUNK = 256
"""Number of calls that are held in memory."""
EPISODES = "(episodes)"
"""Stands for a role when whole episodes are scored."""


@dataclass
class Rescored:
    """The rewards of one role before and after: sums by component over the candidates with new rewards."""

    groups: int = 0
    """Number of calls that were scored, or of tasks whose episodes were scored."""
    candidates: int = 0
    failed: int = 0
    """Number of candidates without a new reward."""
    others_best: int = 0
    """Number of groups of two or more in which another candidate is the best now."""
    sums_before: dict[str, float] = field(default_factory=dict)
    sums_after: dict[str, float] = field(default_factory=dict)
    counts_before: Counter[str] = field(default_factory=Counter)
    counts_after: Counter[str] = field(default_factory=Counter)
    """Number of candidates that have each component."""

    def add_group(
        self, ids: Sequence[str], stored_rewards: Mapping[str, Mapping[str, float]], scored: ByTarget
    ) -> None:
        """Count one group, the candidates with these `ids`. `scored` has the results of the present scorer.

        A candidate without a new reward counts as failed.
        """
        self.groups += 1
        new_rewards: dict[str, Mapping[str, float]] = {}
        for id in ids:
            result = scored.get(id)
            if isinstance(result, Scored) and result.rewards:
                new_rewards[id] = result.rewards
        self.candidates += len(new_rewards)
        self.failed += len(ids) - len(new_rewards)

        # Sum the stored and the new rewards over the same candidates, so that their means can be compared.
        for id, rewards in new_rewards.items():
            for name, value in stored_rewards.get(id, {}).items():
                self.sums_before[name] = self.sums_before.get(name, 0.0) + value
                self.counts_before[name] += 1
            for name, value in rewards.items():
                self.sums_after[name] = self.sums_after.get(name, 0.0) + value
                self.counts_after[name] += 1

        ids_with_both = [id for id in new_rewards if stored_rewards.get(id)]
        if len(ids_with_both) > 1:
            best_before = _best_id(ids_with_both, stored_rewards)
            best_now = _best_id(ids_with_both, new_rewards)
            if best_now != best_before:
                self.others_best += 1


@dataclass
class Rescoring:
    """Rewards before and after by role, and errors of scorers with the number of candidates without a reward."""

    roles: dict[str, Rescored] = field(default_factory=dict)
    errors: Counter[str] = field(default_factory=Counter)
    without_scorer: Counter[str] = field(default_factory=Counter)
    """Number of answered calls of each role without a scorer."""


async def rescore(workflow: Workflow, store: Store, *, role: str | None = None, write: bool = False) -> Rescoring:
    """Score the answered calls of a store with the workflow's present scorers, and the finished episodes with its
    judge. With `role`, only the calls of this role are scored, and no episodes. The application does not run.

    With `write`, the new rewards are stored: a component replaces the component with the same name. The store refuses
    rewards for a group that was trained on, and counts them in `refused`.
    """
    rescoring = Rescoring()
    episodes = list(store.episodes())

    # 1. The calls.
    # A generator: the calls of a large store are read chunk by chunk.
    answered = _calls_to_score(store, episodes, role, workflow, rescoring)
    while chunk := list(islice(answered, CHUNK)):
        scored = await score_calls(workflow, store, chunk)
        groups: list[tuple[str, list[str]]] = []
        for call, _ in chunk:
            groups.append((call.role, [candidate_id(call.id, candidate.index) for candidate in call.candidates]))
        _count_and_store(rescoring, store, groups, scored, workflow.redaction, write=write)

    # 2. The episodes.
    if role is None and workflow.episode_judge is not None:
        for comparable in _comparable_episodes(episodes):
            outcomes = await outcomes_of(workflow.episode_judge, store, comparable, redaction=workflow.redaction)
            episodes_of_task: dict[str, list[str]] = {}
            for episode in comparable:
                if episode.id in outcomes:
                    episodes_of_task.setdefault(episode.task.id, []).append(episode.id)
            groups = [(EPISODES, ids) for ids in episodes_of_task.values()]
            _count_and_store(rescoring, store, groups, outcomes, workflow.redaction, write=write)
    return rescoring


async def score_calls(workflow: Workflow, store: Store, calls: Iterable[tuple[CallRecord, Task]]) -> ByTarget:
    """The rewards of all candidates of stored calls, from the scorers of their roles. Leaves out calls that were not
    answered, and calls of roles without a scorer."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def score_call(call: CallRecord, task: Task) -> ByTarget:
        """The rewards of all candidates of one call. If a message of the call was lost, each has the error instead."""
        targets = [candidate_id(call.id, candidate.index) for candidate in call.candidates]
        async with gate:
            try:
                finished = finished_call(store, call, task)
            except RecordError as error:
                return dict.fromkeys(targets, WorkflowError(error.cause, error.remedy))
            scored = await score(workflow.scorers[call.role], call.candidates, finished, call.role)
        return dict(zip(targets, scored, strict=True))

    work = [score_call(call, task) for call, task in calls if scorable(workflow, call)]
    with context_value(judging, Judging(redaction=workflow.redaction)):
        results = await asyncio.gather(*work)
    by_target: dict[str, Scored | WorkflowError] = {}
    for of_call in results:
        by_target.update(of_call)
    return by_target


def scorable(workflow: Workflow, call: CallRecord) -> bool:
    """Whether a stored call has candidates, and its role a scorer."""
    return call.status == "ok" and bool(call.candidates) and call.role in workflow.scorers


def _calls_to_score(
    store: Store, episodes: Iterable[Episode], role: str | None, workflow: Workflow, rescoring: Rescoring
) -> Iterator[tuple[CallRecord, Task]]:
    """The answered calls of `episodes` whose role has a scorer, each with its task. With `role`, only its calls.

    Answered calls of roles without a scorer are counted in `rescoring`.
    """
    for episode in episodes:
        for call in store.calls(episode.id):
            if role is not None and call.role != role:
                continue
            if scorable(workflow, call):
                yield call, episode.task
            elif call.status == "ok" and call.candidates:
                rescoring.without_scorer[call.role] += 1


def _comparable_episodes(episodes: Iterable[Episode]) -> Iterator[list[Episode]]:
    """Groups of episodes that are compared with each other: episodes of the same phase and step."""
    steps: dict[tuple[str, int | None], list[Episode]] = {}
    for episode in episodes:
        steps.setdefault((episode.phase, episode.training_step), []).append(episode)
    yield from steps.values()


def _count_and_store(
    rescoring: Rescoring,
    store: Store,
    groups: Iterable[tuple[str, Sequence[str]]],
    scored: ByTarget,
    redaction: Redaction | None,
    *,
    write: bool,
) -> None:
    """Count the new rewards of groups in `rescoring`, and with `write` store them.

    A group is a role and the ids of the candidates of one call, or `EPISODES` and the ids of the episodes of one task.
    `scored` has the new reward of each, or the error.
    """
    stored_rewards = store.rewards(scored)
    for role, ids in groups:
        rescoring.roles.setdefault(role, Rescored()).add_group(ids, stored_rewards, scored)
    rescoring.errors.update(str(error) for error in scored.values() if isinstance(error, WorkflowError))
    if write:
        records: list[Record] = []
        for target, result in scored.items():
            if isinstance(result, Scored):
                text_name = result.name
                records += reward_records(target, result.rewards, result.text, text_name, redaction=redaction)
        store.write(records)


def _best_id(ids: Sequence[str], rewards: Mapping[str, Mapping[str, float]]) -> str:
    """The candidate with the highest sum of rewards."""
    return max(ids, key=lambda id: sum(rewards[id].values()))
