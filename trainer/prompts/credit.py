"""Which role is changed next, and forks of recorded runs that show how outcomes depend on single answers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cotune.prompts.edits import PromptPart, Prompts
from cotune.records.structs import CallRecord, Episode, Task
from cotune.replay.forks import repeatable
from cotune.replay.script import read_script
from cotune.storage.episode_filters import EpisodeFilters
from cotune.trainer.prompts.evaluations import FORKS, Evaluations
from cotune.trainer.prompts.showing import said_by
from cotune.trainer.prompts.task_result import read_result

BRANCHES = 2
"""Of each fork, beside the recorded episode."""
MOST_TASKS = 6
LEAST_TASKS = 2


@dataclass
class Credit:
    """What forks have shown: answers to compare, and a sentence on whose calls decide.

    The sentence never ranks roles. A share of the outcomes' variance by role, from forks on at most `MOST_TASKS` tasks,
    changed from one search of an application to the next.
    """

    note: str = ""
    contrasts: Mapping[str, Sequence[tuple[str, float]]] = field(default_factory=dict)
    """By forked call, its answers, each with the outcome it came to."""


async def measure(
    evaluations: Evaluations, base: Prompts, parts: Sequence[PromptPart], tasks: Sequence[Task], floor: float
) -> Credit:
    """Fork recorded episodes at each role's first call, if that is affordable. A fork draws anew what this role says
    and all that comes after it."""
    roles = {role for part in parts for role in part.roles}
    most = evaluations.options.credit * evaluations.options.max_calls
    if len(roles) < 2:
        return Credit(note="one role has prompts")
    if not most:
        return Credit(note="not asked, as credit = 0; roles are changed in turn")
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
        return Credit(
            note=f"not known: forks on {LEAST_TASKS} tasks do not fit into {most:.0f} calls; roles are changed in turn"
        )
    return await _measured(evaluations, base, plans, floor)


async def _measured(
    evaluations: Evaluations,
    base: Prompts,
    plans: Sequence[tuple[Task, Sequence[CallRecord]]],
    floor: float,
) -> Credit:
    store = evaluations.store
    before: dict[tuple[str, int], Episode] = {}
    for episode in store.episodes(EpisodeFilters(phase=FORKS)):
        if episode.fork is not None and episode.is_outcome:  # one that was interrupted is forked anew
            before.setdefault((episode.fork.call, episode.rollout), episode)

    async def branch(task: Task, fork: CallRecord, number: int) -> Episode:
        if known := before.get((fork.id, number)):
            return await evaluations.complete(known)
        return await evaluations.fork(base, read_script(store, fork.episode), fork.id, task, number)

    contrasts: dict[str, list[tuple[str, float]]] = {}
    missing = 0
    for task, forks in plans:
        for fork in forks:
            branches = await asyncio.gather(*(branch(task, fork, number) for number in range(BRANCHES)))
            ended = [episode for episode in branches if episode.is_outcome]
            missing += len(branches) - len(ended)
            said = [(said_by(fork), _outcome(evaluations, fork.episode, floor))]
            for episode in ended:
                at = next((c for c in store.calls(episode.id) if episode.fork and c.id == episode.fork.at), None)
                if at is not None:
                    said.append((said_by(at), _outcome(evaluations, episode.id, floor)))
            contrasts[fork.id] = said
    note = f"not known yet: forks on {len(plans)} tasks are too few to tell; roles are changed in turn"
    if missing:
        note += f"; {missing} branches did not come to an end"
    return Credit(note, contrasts)


def _outcome(evaluations: Evaluations, episode: str, floor: float) -> float:
    tried = read_result(evaluations.store, evaluations.store.episode(episode))
    return floor if tried.outcome is None else tried.outcome


def _firsts(calls: Sequence[CallRecord]) -> list[CallRecord]:
    """The first call of each role, in their order."""
    seen: dict[str, CallRecord] = {}
    for call in calls:
        seen.setdefault(call.role, call)
    return list(seen.values())


class Turns:
    """Whose turn it is: each part as often as any other.

    Without scorers of roles every second turn is all parts': a better answer of one role that the next does not use yet
    changes no outcome, and would be refused for ever.
    """

    def __init__(self, parts: Sequence[PromptPart], *, scored: bool) -> None:
        self._names = [part.name for part in parts]
        self._together = not scored and len(parts) > 1
        self._turn = 0
        self.taken: Counter[str] = Counter()

    def next(self) -> list[str]:
        """The parts that are changed next."""
        self._turn += 1
        if self._together and self._turn % 2:
            return list(self._names)
        chosen = min(self._names, key=lambda name: self.taken[name])
        self.taken[chosen] += 1
        return [chosen]
