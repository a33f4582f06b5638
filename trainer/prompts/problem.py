"""A search's questions, asked from gepa's thread and answered on the event loop of the run."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, TypeVar

from cotune.errors import CotuneError
from cotune.integrations.prompts.search import Candidate, Graded
from cotune.prompts.edits import PromptPart, Prompts
from cotune.prompts.guards import longest
from cotune.prompts.wording import Wording
from cotune.records.structs import Task
from cotune.trainer.prompts.credit import Credit, Turns
from cotune.trainer.prompts.evaluations import Evaluations
from cotune.trainer.prompts.reflection import Reflection, new_text, request
from cotune.trainer.prompts.showing import examples, slot_values
from cotune.trainer.prompts.texts import edited
from cotune.trainer.prompts.tried import Tried

T = TypeVar("T")
Guard = Callable[[PromptPart, str, str, Sequence[Tried]], Sequence[str]]
"""Of a part, its text now, a proposed one and the runs that it was made from: names of the rules that it breaks."""

UNSCORED = -1e6
"""In place of every score of a candidate of which a call did not match: it is never better than anything."""
SCORERS = 0.5
"""How much the mean of the roles' own scorers counts, next to 1 for the outcome: a role that gets better shows even
while the next role wastes its answers."""
SHOWN = 3
"""Runs that the reflection model sees each time: the worst ones, and one of the best. More would fill its context."""
SPARE_ROUNDS = 10
"""Rounds without a new run, beyond three for each minibatch, after which none is to be expected: all minibatches are
perfect, or all proposals are refused or known."""


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """A candidate of the pool: its texts, its scores by validation task, and the candidate that it was made of."""

    texts: Mapping[str, str]
    scores: Mapping[str, float]
    parent: int | None

    @property
    def score(self) -> float:
        return fmean(self.scores.values())


@dataclass
class PromptProblem:
    """What the search asks, with all that answers it. Its methods are called in gepa's thread."""

    evaluations: Evaluations
    reflection: Reflection
    base: Prompts
    """All parts, with the texts from which the search starts."""
    parts: Mapping[str, PromptPart]
    """Those that may change, by name."""
    wording: Wording
    tasks: Mapping[str, Task]
    credit: Credit
    turns: Turns
    floor: float
    guard: Guard
    loop: asyncio.AbstractEventLoop
    on_accepted: Callable[[Accepted], None] = lambda accepted: None
    pool: list[Accepted] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    """Proposals by why they were refused."""
    ended: Exception | None = None
    """Why the search ended before its last round."""
    unscored: int = 0
    """Candidates of which a call did not match."""
    rounds: int = 0
    exhausted: bool = False
    """Whether it ended as nothing new was proposed any more."""

    def __post_init__(self) -> None:
        self._parents: dict[tuple[tuple[str, str], ...], Candidate] = {}
        self._met: set[tuple[str, str]] = set()
        self._news = self._idle = 0
        self._waiting: concurrent.futures.Future[Any] | None = None
        self._stopped = False

    def prompts(self, candidate: Candidate) -> Prompts:
        """The prompts of a candidate."""
        return edited(self.base, self.wording, candidate)

    def start(self) -> dict[str, str]:
        """The candidate from which the search starts."""
        return {part.name: self.wording.text(part.now) for part in self.parts.values()}

    def evaluate(self, candidate: Candidate, tasks: Sequence[str]) -> list[Graded]:
        prompts = self.prompts(candidate)
        made_of = self._parents.get(_key(candidate))
        parent = None if made_of is None else self.prompts(made_of)
        try:
            tried = self._wait(self.evaluations.run(prompts, [self.tasks[id] for id in tasks], parent=parent))
        except Exception as error:
            self.ended = error
            raise
        self._count((prompts.id, task) for task in tasks)
        if any(one.unmatched for one in tried):
            self.unscored += 1
            return [Graded(UNSCORED, one) for one in tried]
        return [Graded(one.score(SCORERS, self.floor), one) for one in tried]

    def choose(self, candidate: Candidate, graded: Sequence[Graded]) -> list[str]:
        return self.turns.next()

    def propose(self, candidate: Candidate, parts: Sequence[str], graded: Sequence[Graded]) -> dict[str, str]:
        if self._stopped or self.ended is not None:  # gepa asks again after an error
            return {}
        try:
            new = self._wait(self._proposed(candidate, parts, [one.of for one in graded]))
        except Exception as error:  # noqa: BLE001 - gepa would hide it, and spend the rest
            self.ended = error
            return {}
        if new:
            self._parents.setdefault(_key({**candidate, **new}), dict(candidate))
        return new

    def accepted(self, candidate: Candidate, scores: Mapping[str, float], parent: int | None) -> None:
        made = Accepted(texts=dict(candidate), scores=dict(scores), parent=parent)
        self.pool.append(made)
        try:
            self.on_accepted(made)
        except Exception as error:  # noqa: BLE001 - gepa would hide it
            self.ended = error

    def stop(self) -> bool:
        self.rounds += 1
        self._idle, self._news = 0 if self._news else self._idle + 1, 0
        options = self.evaluations.options
        spare = SPARE_ROUNDS + 3 * -(-len(self.tasks) // options.minibatch)
        self.exhausted = self._idle > spare
        return self._stopped or self.ended is not None or self.exhausted or self.rounds > options.rounds

    def cancel(self) -> None:
        """End the search as soon as can be; called on the event loop."""
        self._stopped = True
        if self._waiting is not None:
            self._waiting.cancel()

    def best(self) -> Accepted:
        """The candidate with the best mean on the validation tasks; of equals the first one, from which the search
        started, or else the shortest."""
        return max(self.pool, key=lambda one: (one.score, one is self.pool[0], -sum(map(len, one.texts.values()))))

    async def _proposed(self, candidate: Candidate, parts: Sequence[str], tried: Sequence[Tried]) -> dict[str, str]:
        new: dict[str, str] = {}
        for name in parts:
            text = await self._one(self.parts[name], candidate, tried)
            if text is not None:
                new[name] = text
        return new

    async def _one(self, part: PromptPart, candidate: Candidate, tried: Sequence[Tried]) -> str | None:
        text = candidate[part.name]
        store = self.evaluations.store
        fence = self.reflection.fence(part.name, text, [one.episode for one in tried])
        shown = examples(store, part, tried, self.wording, fence, shown=SHOWN, contrasts=self.credit.contrasts)
        if not shown:
            self.refused["not_called"] += 1
            return None
        values = slot_values(store, part, tried)
        most = longest(part)
        reply = await self.reflection.ask(request(part, text, values, shown, self.wording, fence, most), part.name)
        if reply is None:
            self.refused["no_answer"] += 1
            return None
        new = new_text(reply, text)
        if new is None:
            self.refused["unfenced"] += 1
            return None
        if fence.mark in new:
            self.refused["quotes_mark"] += 1
            return None
        against = self.guard(part, text, new, tried)
        self.refused.update(against)
        return None if against else new

    def _count(self, met: Any) -> None:
        before = len(self._met)
        self._met.update(met)
        self._news += len(self._met) - before

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        if self._stopped:
            work.close()
            raise CotuneError("The search was interrupted.", "Go on with --resume.")
        self._waiting = waiting = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return waiting.result()
        except concurrent.futures.CancelledError:
            raise CotuneError("The search was interrupted.", "Go on with --resume.") from None


def _key(candidate: Candidate) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(candidate.items()))
