"""Runs candidates on tasks, and never twice: what a record holds is answered from it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace

import msgspec

from cotune.episodes.episode import EpisodeOptions, run_episode
from cotune.episodes.rescore import score_calls
from cotune.episodes.rollout import repeating
from cotune.episodes.workflows import Workflow
from cotune.errors import ConfigError, CotuneError, RunError, WorkflowError
from cotune.judging.episodes import Ranking, judge_episodes
from cotune.prompts.edits import Prompts
from cotune.reading.prompt_search import HELD_OUT_PHASE, PHASES
from cotune.recording.recorder import Responder
from cotune.recording.rewards import reward_records
from cotune.records.ids import candidate_id
from cotune.records.structs import CallRecord, Episode, Task
from cotune.replay.forks import repeatable
from cotune.replay.script import Replay, Script, read_script
from cotune.sampling.scoring import Scored
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.protocol import Store
from cotune.trainer.evaluation.policies import answering
from cotune.trainer.prompts.options import ImproveOptions
from cotune.trainer.prompts.spending import LimitReached, Spending
from cotune.trainer.prompts.tried import Tried, read_tried

SEARCH, HELD_OUT, FORKS = PHASES, HELD_OUT_PHASE, f"{PHASES}-forks"
"""Phases of the episodes of a search."""
_ATTEMPTS = 3
"""Times that an episode is begun that fails through no fault of the application."""


def answering_in_search(
    workflow: Workflow, options: ImproveOptions, say: Callable[[str], None]
) -> AbstractAsyncContextManager[Responder | None]:
    """Who answers the application's calls in a search: see `answering`."""
    return answering(
        workflow,
        policies=options.run,
        model=options.model,
        max_tokens=options.sampling.max_tokens,
        temperature=None,
        say=say,
        seed=options.seed,
        stream="prompts",
    )


@dataclass
class Evaluations:
    """The episodes of a search, run and remembered."""

    workflow: Workflow
    store: Store
    responder: Responder | None
    options: ImproveOptions
    spending: Spending
    on_episode: Callable[[Episode], None] = lambda episode: None
    counts: Counter[str] = field(default_factory=Counter)
    """What happened beside plain episodes: repeated prefixes, divergences, retries, calls without an edit."""
    errors: dict[str, str] = field(default_factory=dict)
    """Of scorers and of the judge, by the name of the count: the first one."""

    def __post_init__(self) -> None:
        self._known: dict[tuple[str, str, str], Tried] = {}
        self._seen: dict[tuple[str, str, str], Episode] = {}
        self._gate = asyncio.Semaphore(self.options.concurrency)
        self._down: RunError | None = None
        for phase in (SEARCH, HELD_OUT, FORKS):
            for episode in self.store.episodes(EpisodeFilters(phase=phase)):
                self.spending.count(_asked(episode, self.store.calls(episode.id, lean=True)))
                if episode.is_outcome and phase != FORKS:
                    self._seen.setdefault((phase, episode.prompts, episode.task.id), episode)
        for id in self.store.figures().unfinished():  # a killed process had asked them, and they were paid
            self.spending.add(self.store.calls(id, lean=True))

    async def run(
        self, prompts: Prompts, tasks: Sequence[Task], *, phase: str = SEARCH, parent: Prompts | None = None
    ) -> list[Tried]:
        """The candidate on these tasks, in their order. Where `parent` ran on a task before, calls before the first
        one of a changed role are answered from its record.

        Raises LimitReached once the episodes under way have ended, RunError where models cannot be reached.
        """
        await asyncio.gather(*(self._recall((phase, prompts.id, task)) for task in {task.id for task in tasks}))
        due = {task.id: task for task in tasks if self.known(prompts, task.id, phase) is None}
        made = await asyncio.gather(
            *(self._run(prompts, task, phase, parent) for task in due.values()), return_exceptions=True
        )
        errors = [one for one in made if isinstance(one, BaseException)]
        if errors:
            raise min(errors, key=lambda error: isinstance(error, LimitReached))
        found = (self.known(prompts, task.id, phase) for task in tasks)
        return [one for one in found if one is not None]

    def known(self, prompts: Prompts, task: str, phase: str = SEARCH) -> Tried | None:
        """What a candidate did on a task, if it ran on it."""
        return self._known.get((phase, prompts.id, task))

    def asked(self, phase: str) -> set[str]:
        """Ids of the candidates that have run in a phase; "" is the prompts as they were."""
        return {prompts for of, prompts, _ in (*self._seen, *self._known) if of == phase}

    async def complete(self, episode: Episode) -> Episode:
        """An episode of an earlier process, with the rewards that this one was stopped before."""
        async with self._gate:
            await self._score(episode, self.store.calls(episode.id), again=True)
        return episode

    async def fork(self, prompts: Prompts, script: Script, fork: str, task: Task, number: int) -> Episode:
        """An episode that repeats another of these prompts up to the call `fork`, from which on all is new."""
        replay = Replay(script=_unsealed(script, fork), fork=fork)
        async with self._gate:
            self.spending.require_room()
            return await self._episode(task, FORKS, prompts, replay, number)

    async def _recall(self, key: tuple[str, str, str]) -> None:
        if key in self._seen and key not in self._known:
            self._keep(key, await self.complete(self._seen[key]))

    async def _run(self, prompts: Prompts, task: Task, phase: str, parent: Prompts | None) -> None:
        async with self._gate:
            if self._down is not None:  # what waits would fail as well, each after its own time-outs
                raise self._down
            self.spending.require_room()
            episode = await self._whole(prompts, task, phase, parent)
        self._keep((phase, prompts.id, task.id), episode)

    async def _whole(self, prompts: Prompts, task: Task, phase: str, parent: Prompts | None) -> Episode:
        replay = self._prefix(prompts, task, phase, parent) if parent is not None else None
        if replay is not None:
            episode = await self._episode(task, phase, prompts, replay)
            if episode.blame != "divergence":
                self.counts["repeated"] += 1
                return await self._sound(episode, task, phase, prompts)
            self.counts["diverged"] += 1
        return await self._sound(await self._episode(task, phase, prompts), task, phase, prompts)

    async def _sound(self, episode: Episode, task: Task, phase: str, prompts: Prompts) -> Episode:
        """The episode, or another one where it failed through no fault of the application."""
        for attempt in range(1, _ATTEMPTS):
            if episode.is_outcome:
                return episode
            self.counts["retried"] += 1
            await asyncio.sleep(attempt)
            episode = await self._episode(task, phase, prompts)
        if episode.is_outcome:
            return episode
        self._down = RunError(
            f"Task {task.id} failed {_ATTEMPTS} times, and not by the application: {episode.error or episode.status}",
            "Go on with --resume once the models can be reached.",
        )
        raise self._down

    async def _episode(
        self, task: Task, phase: str, prompts: Prompts, replay: Replay | None = None, number: int = 0
    ) -> Episode:
        flow, responder = replace(self.workflow, prompts=prompts if prompts.id else None), self.responder
        if replay is not None:
            flow, responder = repeating(flow, replay, responder)
        options = EpisodeOptions(
            phase=phase,
            rollout=number,
            timeout=self.options.episode_timeout,
            record_tools=replay is not None and bool(replay.script.results),
            freeze=replay is not None and bool(replay.script.reads),
        )
        self.spending.running += 1
        try:
            outcome = await run_episode(flow, task, sink=self.store, responder=responder, options=options)
            episode = outcome.episode
            await asyncio.to_thread(self.store.flush)
            calls = self.store.calls(episode.id)
            self.spending.count(_asked(episode, calls))
        finally:
            self.spending.running -= 1
        await self._score(episode, calls)
        self.on_episode(episode)
        return episode

    async def _score(self, episode: Episode, calls: Iterable[CallRecord], *, again: bool = False) -> None:
        """Give answers, and the episode, the rewards of the workflow's scorers and judge that they do not have yet.
        With `again` an episode that has an outcome is not judged."""
        chosen = {call.id: candidate_id(call.id, call.chosen or 0) for call in calls if call.chosen is not None}
        scored = self.store.rewards(chosen.values())
        bare = [call for call in calls if call.id in chosen and not scored.get(chosen[call.id])]
        given = await score_calls(self.workflow, self.store, ((call, episode.task) for call in bare))
        for target, one in given.items():
            if isinstance(one, Scored):
                self.store.write(reward_records(target, *one, redaction=self.workflow.redaction))
            else:
                self._fault("scorer_errors", one)
        due = not again or not self.store.rewards([episode.id]).get(episode.id)
        if self.workflow.episode_judge is not None and episode.status == "ok" and due:
            judge, limit = self.workflow.episode_judge, self.options.episode_timeout
            try:
                async with asyncio.timeout(limit):
                    await judge_episodes(judge, self.store, [episode], redaction=self.workflow.redaction)
            except TimeoutError:
                cause = f"The episode judge did not finish within {limit:g} seconds on task {episode.task.id!r}."
                self._fault("judge_errors", WorkflowError(cause, "Look at what it waits for, or raise timeout."))
            except WorkflowError as error:
                self._fault("judge_errors", error)
        await asyncio.to_thread(self.store.flush)

    def _fault(self, name: str, error: WorkflowError) -> None:
        self.counts[name] += 1
        self.errors.setdefault(name, str(error))

    def _prefix(self, prompts: Prompts, task: Task, phase: str, parent: Prompts) -> Replay | None:
        """How the candidate's episode repeats its parent's; None where it cannot, or nothing would be saved."""
        before = self.known(parent, task.id, phase)
        if before is None:
            return None
        was = {part.name: part.now for part in parent.parts}
        changed = {role for part in prompts.parts if part.now != was.get(part.name) for role in part.roles}
        calls = self.store.calls(before.episode)
        fork = next((call for call in calls if call.role in changed), None)
        if fork is None or fork is calls[0] or not repeatable(calls, fork):
            return None
        try:
            script = read_script(self.store, before.episode)
        except CotuneError:
            return None
        held = script.before(fork.id)
        if any(call.id in held and call.role in changed for call in script.calls):
            return None  # calls side by side: the record would answer some of them under the old prompt
        return Replay(script=_unsealed(script, fork.id), fork=fork.id)

    def _keep(self, key: tuple[str, str, str], episode: Episode) -> None:
        tried = read_tried(self.store, episode)
        self.counts["unmatched"] += sum(tried.unmatched.values())
        self._known[key] = tried


def check_judge(workflow: Workflow) -> None:
    """Raise ConfigError for a judge that compares episodes with each other."""
    if isinstance(workflow.episode_judge, Ranking):
        raise ConfigError(
            "judge",
            None,
            "compares episodes with each other, and prompts are compared by a number for each",
            "Give the workflow an outcome, or a judge of single episodes.",
        )


def _asked(episode: Episode, calls: Sequence[CallRecord]) -> Sequence[CallRecord]:
    """Its calls without the one at which it diverged from a record, which nobody was asked."""
    return [call for call in calls if call.status == "ok"] if episode.blame == "divergence" else calls


def _unsealed(script: Script, fork: str) -> Script:
    """The script without the token ids of the prompt at the fork, which is another one under other prompts."""
    calls = tuple(
        msgspec.structs.replace(call, answer=msgspec.structs.replace(call.answer, prompt_ids=()))
        if call.id == fork
        else call
        for call in script.calls
    )
    return msgspec.structs.replace(script, calls=calls)
