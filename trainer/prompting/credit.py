"""Which role is changed next: those whose calls decide the outcome more often than others."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, variance

from cotune.prompts.edits import PromptPart, Prompts
from cotune.records.structs import CallRecord, Episode, Task
from cotune.replay.forks import repeatable
from cotune.replay.script import read_script
from cotune.trainer.prompting.evaluations import FORKS, Evaluations
from cotune.trainer.prompting.showing import said_by
from cotune.trainer.prompting.tried import read_tried

BRANCHES = 2
"""Of each fork, beside the recorded episode."""
MOST_TASKS = 6
LEAST_TASKS = 2
_LEAST = 0.1
"""Of a role's weight against the mean: no role is left out for good, as forks are few."""


@dataclass
class Credit:
    """How much outcomes vary by what each role says, and why that is not known where it is not."""

    weights: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    contrasts: Mapping[str, Sequence[tuple[str, float]]] = field(default_factory=dict)
    """By forked call, its answers, each with the outcome it came to."""


async def measure(
    evaluations: Evaluations, base: Prompts, parts: Sequence[PromptPart], tasks: Sequence[Task], floor: float
) -> Credit:
    """Fork recorded episodes at each role's first call, where that is affordable.

    A fork at a role's first call draws anew what this role says and all that comes after it. So the variance of the
    outcomes of a fork, less that of the fork at the next role's first call, is that role's own.
    """
    roles = {role for part in parts for role in part.roles}
    most = evaluations.options.credit * evaluations.options.max_calls
    if len(roles) < 2:
        return Credit(note="one role has prompts")
    if not most:
        return Credit(note="roles are changed in turn, as credit = 0")
    chosen = tasks[:MOST_TASKS]
    trunks = [one for one in await evaluations.run(base, chosen) if one.outcome is not None]
    known = {task.id: task for task in chosen}
    plans: list[tuple[Task, list[CallRecord]]] = []
    planned = 0
    for trunk in trunks:
        calls = evaluations.store.calls(trunk.episode)
        forks = [call for call in _firsts(calls) if call.role in roles and repeatable(calls, call)]
        price = BRANCHES * sum(len(calls) - calls.index(fork) for fork in forks)
        if len(forks) > 1 and planned + price <= most:
            plans.append((known[trunk.task], forks))
            planned += price
    if len(plans) < LEAST_TASKS:
        return Credit(note=f"roles are changed in turn: forks on {LEAST_TASKS} tasks do not fit into {most:.0f} calls")
    return await _measured(evaluations, base, plans, floor)


async def _measured(
    evaluations: Evaluations,
    base: Prompts,
    plans: Sequence[tuple[Task, Sequence[CallRecord]]],
    floor: float,
) -> Credit:
    store = evaluations.store
    before: dict[tuple[str, int], Episode] = {}
    for episode in store.episodes(phase=FORKS):
        if episode.fork is not None and episode.is_outcome:  # one that was interrupted is forked anew
            before.setdefault((episode.fork.call, episode.rollout), episode)

    async def branch(task: Task, fork: CallRecord, number: int) -> Episode:
        if known := before.get((fork.id, number)):
            return await evaluations.complete(known)
        return await evaluations.fork(base, read_script(store, fork.episode), fork.id, task, number)

    variances: dict[str, list[float]] = {}
    contrasts: dict[str, list[tuple[str, float]]] = {}
    missing = 0
    for task, forks in plans:
        own: list[tuple[str, float]] = []
        for fork in forks:
            made = await asyncio.gather(*(branch(task, fork, number) for number in range(BRANCHES)))
            ended = [episode for episode in made if episode.is_outcome]
            missing += len(made) - len(ended)
            values = [_outcome(evaluations, fork.episode, floor)]
            said = [(said_by(fork), values[0])]
            for episode in ended:
                value = _outcome(evaluations, episode.id, floor)
                values.append(value)
                at = next((c for c in store.calls(episode.id) if episode.fork and c.id == episode.fork.at), None)
                if at is not None:
                    said.append((said_by(at), value))
            contrasts[fork.id] = said
            if len(values) > 1:
                own.append((fork.role, variance(values)))
        for (role, mine), (_, after) in pairwise([*own, ("", 0.0)]):
            variances.setdefault(role, []).append(mine - after)
    weights = {role: max(fmean(of), 0.0) for role, of in variances.items()}
    note = f"forks on {len(plans)} tasks" + (f", {missing} branches did not come to an end" if missing else "")
    if not any(weights.values()):
        return Credit(note=f"roles are changed in turn: outcomes do not vary over {note}", contrasts=contrasts)
    return Credit(weights, note, contrasts)


def _outcome(evaluations: Evaluations, episode: str, floor: float) -> float:
    tried = read_tried(evaluations.store, evaluations.store.episode(episode))
    return floor if tried.outcome is None else tried.outcome


def _firsts(calls: Sequence[CallRecord]) -> list[CallRecord]:
    """The first call of each role, in their order."""
    seen: dict[str, CallRecord] = {}
    for call in calls:
        seen.setdefault(call.role, call)
    return list(seen.values())


class Turns:
    """Whose turn it is: parts in proportion to the weights of their roles, or, where these are unknown, in turn.

    Without scorers of roles every second turn is all parts': a better answer of one role that the next does not use yet
    changes no outcome, and would be refused for ever.
    """

    def __init__(self, parts: Sequence[PromptPart], weights: Mapping[str, float], *, scored: bool) -> None:
        mean = fmean(weights.values()) if weights else 0.0
        self._weights = {
            part.name: max([weights.get(role, 0.0) for role in part.roles] + [_LEAST * mean]) if mean else 1.0
            for part in parts
        }
        self._together = not scored and len(parts) > 1
        self._turn = 0
        self.taken: Counter[str] = Counter()

    def next(self) -> list[str]:
        """The parts that are changed next."""
        self._turn += 1
        if self._together and self._turn % 2:
            return list(self._weights)
        chosen = min(self._weights, key=lambda name: (self.taken[name] + 1) / self._weights[name])
        self.taken[chosen] += 1
        return [chosen]
