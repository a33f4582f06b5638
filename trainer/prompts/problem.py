"""The problem that gepa solves: it calls from its own thread, and the answers are computed on the run's event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, TypeVar

from cotune.errors import CotuneError
from cotune.integrations.prompts.search import Candidate, Graded
from cotune.prompts.edits import PromptPart, Prompts
from cotune.prompts.guards import max_characters
from cotune.prompts.wording import Wording
from cotune.reading.blame import LostEpisode
from cotune.records.structs import Task
from cotune.trainer.prompts.evaluations import Evaluations
from cotune.trainer.prompts.reflection import Reflection, new_text, reflection_request
from cotune.trainer.prompts.role_choice import Turns
from cotune.trainer.prompts.showing import decisive_failures, examples, slot_values
from cotune.trainer.prompts.task_result import TaskResult
from cotune.trainer.prompts.texts import edited_prompts

T = TypeVar("T")
Guard = Callable[[PromptPart, str, str, Sequence[TaskResult]], Sequence[str]]
"""Takes a part, its present text, a proposed text and the runs behind the proposal. Returns the names of the rules that
the proposal breaks."""

UNSCORED = -1e6
"""Replaces all scores of a candidate if a call did not have the text to edit, so that it is never better."""
SCORERS = 0.5
"""Weight of the mean score of the roles' scorers; the outcome has weight 1. An improved role shows in this score even
if the next role wastes its answers."""
SHOWN = 3
"""Number of the worst runs that the reflection model sees each time, in addition to one of the best. More would fill
its context."""
SPARE_ROUNDS = 10
"""The search ends after this number of rounds without a new run, plus three for each minibatch. Then all minibatches
are perfect, or all proposals are refused or were tried before."""


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """A candidate of the pool: its texts, its scores by validation task, and the candidate it was derived from."""

    texts: Mapping[str, str]
    scores: Mapping[str, float]
    parent: int | None

    @property
    def score(self) -> float:
        return fmean(self.scores.values())


@dataclass
class PromptProblem:
    """The search problem for gepa, with everything it needs. Methods are called in gepa's thread."""

    evaluations: Evaluations
    reflection: Reflection
    base: Prompts
    """All parts, with their texts at the start of the search."""
    parts: Mapping[str, PromptPart]
    """The parts that may change, by name."""
    wording: Wording
    tasks: Mapping[str, Task]
    lost: Sequence[LostEpisode]
    """Failed runs of the prompts from which the search started, each with the call that decided it."""
    places: Mapping[str, str]
    """By role, a paragraph on the roles whose answers it reads, and on the roles that read its answers."""
    turns: Turns
    floor: float
    guard: Guard
    loop: asyncio.AbstractEventLoop
    on_accepted: Callable[[Accepted], None] = lambda accepted: None
    pool: list[Accepted] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    """Number of refused proposals by reason."""
    ended: Exception | None = None
    """The error that ended the search before its last round."""
    unscored: int = 0
    """Number of candidates with a call that did not have the text to edit."""
    rounds: int = 0
    exhausted: bool = False
    """Whether it ended because nothing new was proposed any more."""

    def __post_init__(self) -> None:
        self._parents: dict[tuple[tuple[str, str], ...], Candidate] = {}
        self._evaluated: set[tuple[str, str]] = set()
        """Ids of prompts and tasks that have been run."""
        self._new_in_round = self._idle_rounds = 0
        self._waiting: concurrent.futures.Future[Any] | None = None
        self._stopped = False

    def prompts(self, candidate: Candidate) -> Prompts:
        """Return the prompts of a candidate."""
        return edited_prompts(self.base, self.wording, candidate)

    def start(self) -> dict[str, str]:
        """Return the first candidate of the search."""
        return {part.name: self.wording.text(part.now) for part in self.parts.values()}

    def evaluate(self, candidate: Candidate, tasks: Sequence[str]) -> list[Graded]:
        """Run a candidate on tasks, given by their ids, and return its scores."""
        # 1. Run it. Its parent, the candidate that was changed, may have run on these tasks before. Calls that do not
        # depend on the change are then repeated from that record.
        prompts = self.prompts(candidate)
        parent_texts = self._parents.get(_candidate_key(candidate))
        parent = None if parent_texts is None else self.prompts(parent_texts)
        try:
            results = self._wait_on_loop(self.evaluations.run(prompts, [self.tasks[id] for id in tasks], parent=parent))
        except Exception as error:
            self.ended = error
            raise

        # 2. Count new runs for `stop`, which ends a search without any.
        for task in tasks:
            if (prompts.id, task) not in self._evaluated:
                self._evaluated.add((prompts.id, task))
                self._new_in_round += 1

        # 3. Score it. If a call did not have the text to edit, the candidate was not really tried.
        if any(result.unmatched for result in results):
            self.unscored += 1
            return [Graded(UNSCORED, result) for result in results]
        return [Graded(result.score(SCORERS, self.floor), result) for result in results]

    def choose(self, candidate: Candidate, graded: Sequence[Graded]) -> list[str]:
        return self.turns.next()

    def propose(self, candidate: Candidate, parts: Sequence[str], graded: Sequence[Graded]) -> dict[str, str]:
        """Ask the reflection model for new texts of these parts. Returns the changed parts by name; none once the
        search has ended. Called by gepa, in its thread."""
        if self._stopped or self.ended is not None:  # gepa asks again after an error
            return {}
        try:
            new = self._wait_on_loop(self._propose_texts(candidate, parts, [scored.of for scored in graded]))
        except Exception as error:  # noqa: BLE001 - gepa would hide it, and spend the rest of the budget
            self.ended = error
            return {}
        if new:
            # The texts that these prompts were written from. Prompts that are proposed twice keep their first parent.
            self._parents.setdefault(_candidate_key({**candidate, **new}), dict(candidate))
        return new

    def accepted(self, candidate: Candidate, scores: Mapping[str, float], parent: int | None) -> None:
        """Add a candidate to the pool."""
        new = Accepted(texts=dict(candidate), scores=dict(scores), parent=parent)
        self.pool.append(new)
        try:
            self.on_accepted(new)
        except Exception as error:  # noqa: BLE001 - gepa would hide it
            self.ended = error

    def stop(self) -> bool:
        """Count a round, and return whether the search ends before it. It ends if it was stopped, after an error, at
        the limit of rounds, or if too many rounds in a row made no new run."""
        self.rounds += 1
        self._idle_rounds += 1
        if self._new_in_round:
            self._idle_rounds = 0
        self._new_in_round = 0
        options = self.evaluations.options
        # Rounds of three passes over the tasks may be idle, because each round takes other tasks.
        rounds_per_pass = math.ceil(len(self.tasks) / options.minibatch)
        self.exhausted = self._idle_rounds > SPARE_ROUNDS + 3 * rounds_per_pass
        return self._stopped or self.ended is not None or self.exhausted or self.rounds > options.rounds

    def cancel(self) -> None:
        """End the search as soon as can be; called on the event loop."""
        self._stopped = True
        if self._waiting is not None:
            self._waiting.cancel()

    def best(self) -> Accepted:
        """Return the candidate with the best mean on the validation tasks. Among equals, the start of the search wins,
        then the shortest."""

        # A longer prompt costs tokens in every call, so it must do better to be chosen.
        def rank(candidate: Accepted) -> tuple[float, bool, int]:
            length = sum(len(text) for text in candidate.texts.values())
            return candidate.score, candidate is self.pool[0], -length

        return max(self.pool, key=rank)

    async def _propose_texts(
        self, candidate: Candidate, parts: Sequence[str], results: Sequence[TaskResult]
    ) -> dict[str, str]:
        """New texts by part, without the parts for which the reflection model gave none."""
        new: dict[str, str] = {}
        for name in parts:
            text = await self._propose_text(self.parts[name], candidate, results)
            if text is not None:
                new[name] = text
        return new

    async def _propose_text(self, part: PromptPart, candidate: Candidate, results: Sequence[TaskResult]) -> str | None:
        """Ask the reflection model for a new text of one part. Returns None without one, or if the text is refused.
        The reason is counted."""
        # 1. The request, with the calls to show.
        text = candidate[part.name]
        store = self.evaluations.store
        fence = self.reflection.fence(part.name, text, [result.episode for result in results])
        decisive = decisive_failures(store, self.lost, part)
        shown_examples = examples(store, part, results, self.wording, fence, shown=SHOWN, decisive=decisive)
        if not shown_examples:
            self.refused["not_called"] += 1
            return None
        values = slot_values(store, part, results)
        longest_text = max_characters(part)
        places = [self.places[role] for role in part.roles if role in self.places]
        messages = reflection_request(part, text, values, shown_examples, self.wording, fence, longest_text, places)

        # 2. The reply.
        reply = await self.reflection.ask(messages, part.name)
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

        # 3. The rules for new texts, such as that it copies no text of the runs that were shown.
        decisive_runs: list[TaskResult] = []
        for failure in decisive:
            decisive_runs.append(failure.result)
            if failure.redraw_result is not None:
                decisive_runs.append(failure.redraw_result)
        broken_rules = self.guard(part, text, new, [*results, *decisive_runs])
        self.refused.update(broken_rules)
        return None if broken_rules else new

    def _wait_on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work on the run's event loop, and wait for it in gepa's thread."""
        if self._stopped:
            work.close()
            raise CotuneError("The search was interrupted.", "Continue with --resume.")
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        self._waiting = future  # for `cancel`
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise CotuneError("The search was interrupted.", "Continue with --resume.") from None


def _candidate_key(candidate: Candidate) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(candidate.items()))
