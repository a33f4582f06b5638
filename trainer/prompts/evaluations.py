"""Runs candidates on tasks, each only once: recorded results are used again."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace

import msgspec

from cotune.episodes.episode import EpisodeOptions, run_episode
from cotune.episodes.rescore import score_calls
from cotune.episodes.rollout import repeat_episode
from cotune.episodes.workflows import Workflow
from cotune.errors import ConfigError, CotuneError, RunError, WorkflowError
from cotune.judging.episodes import EpisodeJudge, Ranking, judge_episodes
from cotune.prompts.edits import Prompts
from cotune.reading.prompt_search import HELD_OUT_PHASE, PHASES
from cotune.recording.recorder import Responder
from cotune.recording.rewards import reward_records
from cotune.records.ids import candidate_id
from cotune.records.structs import CallRecord, Episode, Task
from cotune.replay.forks import can_repeat_before
from cotune.replay.script import Replay, Script, ScriptCall, read_script
from cotune.sampling.scoring import Scored
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.protocol import Store
from cotune.trainer.evaluation.policies import answering
from cotune.trainer.prompts.options import ImproveOptions
from cotune.trainer.prompts.spending import LimitReached, Spending
from cotune.trainer.prompts.task_result import TaskResult, read_result

SEARCH = PHASES
"""Phase of the episodes by which a search finds prompts."""
HELD_OUT = HELD_OUT_PHASE
"""Phase of the episodes on held-out tasks."""
_ATTEMPTS = 3
"""Maximum number of attempts at an episode that fails for a reason outside the application."""


def answering_in_search(
    workflow: Workflow, options: ImproveOptions, say: Callable[[str], None]
) -> AbstractAsyncContextManager[Responder | None]:
    """Yield the responder for the application's calls in a search: see `answering`."""
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


RunKey = tuple[str, str, str]
"""Phase, id of the prompts, and id of the task."""


@dataclass
class Evaluations:
    """Runs the episodes of a search, and remembers their results."""

    workflow: Workflow
    store: Store
    responder: Responder | None
    options: ImproveOptions
    spending: Spending
    on_episode: Callable[[Episode], None] = lambda episode: None
    counts: Counter[str] = field(default_factory=Counter)
    """Numbers of repeated prefixes, divergences, retries, calls without an edit, and errors."""
    errors: dict[str, str] = field(default_factory=dict)
    """The first error of scorers and of the judge, by the name of their count."""

    def __post_init__(self) -> None:
        """Read the results that the store has, and count their calls as spent: a resumed search does not run them
        again."""
        self._results: dict[RunKey, TaskResult] = {}
        self._recorded: dict[RunKey, Episode] = {}
        """Episodes of an earlier process. Their results are read when they are needed."""
        self._gate = asyncio.Semaphore(self.options.concurrency)
        self._models_down: RunError | None = None
        for phase in (SEARCH, HELD_OUT):
            for episode in self.store.episodes(EpisodeFilters(phase=phase)):
                self.spending.count(_calls_to_models(episode, self.store.calls(episode.id, lean=True)))
                if episode.is_outcome:
                    self._recorded.setdefault((phase, episode.prompts, episode.task.id), episode)
        for id in self.store.figures().unfinished():  # calls of a killed process were paid too
            self.spending.add(self.store.calls(id, lean=True))

    async def run(
        self, prompts: Prompts, tasks: Sequence[Task], *, phase: str = SEARCH, parent: Prompts | None = None
    ) -> list[TaskResult]:
        """Return the results of a candidate on these tasks, in their order, and run the tasks that are missing.

        If `parent` ran on a task before, the calls before the first call of a changed role are answered from its
        record. Raises LimitReached once running episodes have ended, RunError if models cannot be reached.
        """
        await asyncio.gather(*(self._read_recorded((phase, prompts.id, task)) for task in {task.id for task in tasks}))
        missing = {task.id: task for task in tasks if self.result_of(prompts, task.id, phase) is None}
        # Errors are returned first, so that running episodes end before one of them is raised.
        outcomes = await asyncio.gather(
            *(self._run(prompts, task, phase, parent) for task in missing.values()), return_exceptions=True
        )
        errors = [error for error in outcomes if isinstance(error, BaseException)]
        if errors:
            # Any other error tells the user more than LimitReached.
            raise min(errors, key=lambda error: isinstance(error, LimitReached))
        results: list[TaskResult] = []
        for task in tasks:
            result = self.result_of(prompts, task.id, phase)
            if result is not None:
                results.append(result)
        return results

    def result_of(self, prompts: Prompts, task: str, phase: str = SEARCH) -> TaskResult | None:
        """Return the result of a candidate on a task; None if it has not run on it."""
        return self._results.get((phase, prompts.id, task))

    def candidates_of(self, phase: str) -> set[str]:
        """Return the ids of the candidates that have run in a phase; "" stands for the unedited prompts."""
        keys = [*self._recorded, *self._results]
        return {prompts for key_phase, prompts, _task in keys if key_phase == phase}

    async def _read_recorded(self, key: RunKey) -> None:
        """Read the result of a recorded episode, if there is one. An episode of an interrupted process gets the rewards
        that it still lacks."""
        if key not in self._recorded or key in self._results:
            return
        episode = self._recorded[key]
        async with self._gate:
            await self._score(episode, self.store.calls(episode.id), keep_outcome=True)
        self._add_result(key, episode)

    async def _run(self, prompts: Prompts, task: Task, phase: str, parent: Prompts | None) -> None:
        """Run a candidate on a task and keep the result."""
        async with self._gate:
            # If models cannot be reached, every further episode would fail too, each after its own time-outs.
            if self._models_down is not None:
                raise self._models_down
            self.spending.require_room()
            episode = await self._run_task(prompts, task, phase, parent)
        self._add_result((phase, prompts.id, task.id), episode)

    async def _run_task(self, prompts: Prompts, task: Task, phase: str, parent: Prompts | None) -> Episode:
        """Run a candidate on a task. It repeats the beginning of its parent's episode, if that is possible."""
        replay = None if parent is None else self._replay_of_parent(prompts, task, phase, parent)
        if replay is None:
            episode = await self._run_one_episode(task, phase, prompts)
        else:
            episode = await self._run_one_episode(task, phase, prompts, replay)
            if episode.blame == "divergence":
                self.counts["diverged"] += 1
                episode = await self._run_one_episode(task, phase, prompts)
            else:
                self.counts["repeated"] += 1
        return await self._retry(episode, task, phase, prompts)

    async def _retry(self, episode: Episode, task: Task, phase: str, prompts: Prompts) -> Episode:
        """Run an episode again while it fails for a reason outside the application, such as an outage. Returns the
        first one that does not. Raises RunError after `_ATTEMPTS`."""
        for attempt in range(1, _ATTEMPTS):
            if episode.is_outcome:
                return episode
            self.counts["retried"] += 1
            await asyncio.sleep(attempt)
            episode = await self._run_one_episode(task, phase, prompts)
        if episode.is_outcome:
            return episode
        self._models_down = RunError(
            f"Task {task.id} failed {_ATTEMPTS} times, and not by the application: {episode.error or episode.status}",
            "Continue with --resume once the models can be reached.",
        )
        raise self._models_down

    async def _run_one_episode(self, task: Task, phase: str, prompts: Prompts, replay: Replay | None = None) -> Episode:
        """Run one episode on a task with a candidate's prompts, have it scored, and count its calls. With `replay`, it
        repeats the beginning of a recorded episode."""
        flow = replace(self.workflow, prompts=prompts if prompts.id else None)
        responder = self.responder
        if replay is not None:
            flow, responder = repeat_episode(flow, replay, responder)
        options = EpisodeOptions(
            phase=phase,
            timeout=self.options.episode_timeout,
            record_tools=replay is not None and bool(replay.script.results),
            freeze=replay is not None and bool(replay.script.reads),
        )
        # Until its calls are counted, the limits reserve the mean number of calls for this episode.
        self.spending.running += 1
        try:
            outcome = await run_episode(flow, task, sink=self.store, responder=responder, options=options)
            episode = outcome.episode
            await asyncio.to_thread(self.store.flush)
            calls = self.store.calls(episode.id)
            self.spending.count(_calls_to_models(episode, calls))
        finally:
            self.spending.running -= 1
        await self._score(episode, calls)
        self.on_episode(episode)
        return episode

    async def _score(self, episode: Episode, calls: Iterable[CallRecord], *, keep_outcome: bool = False) -> None:
        """Have the workflow's scorers reward the chosen answers that have no rewards yet, and its judge the episode.
        With `keep_outcome` an episode that has an outcome is not judged."""
        chosen_ids = {call.id: candidate_id(call.id, call.chosen) for call in calls if call.chosen is not None}
        stored_rewards = self.store.rewards(chosen_ids.values())
        unscored = [call for call in calls if call.id in chosen_ids and not stored_rewards.get(chosen_ids[call.id])]
        scores = await score_calls(self.workflow, self.store, ((call, episode.task) for call in unscored))
        for target, score in scores.items():
            if isinstance(score, Scored):
                self.store.write(reward_records(target, *score, redaction=self.workflow.redaction))
            else:
                self._count_error("scorer_errors", score)
        has_outcome = keep_outcome and bool(self.store.rewards([episode.id]).get(episode.id))
        if self.workflow.episode_judge is not None and episode.status == "ok" and not has_outcome:
            await self._ask_judge(self.workflow.episode_judge, episode)
        await asyncio.to_thread(self.store.flush)

    async def _ask_judge(self, judge: EpisodeJudge, episode: Episode) -> None:
        """Have the workflow's judge give an episode its outcome. Its errors are counted, and leave no outcome."""
        limit = self.options.episode_timeout
        try:
            async with asyncio.timeout(limit):
                await judge_episodes(judge, self.store, [episode], redaction=self.workflow.redaction)
        except TimeoutError:
            cause = f"The episode judge did not finish within {limit:g} seconds on task {episode.task.id!r}."
            remedy = "Find out why it waits, or raise episode_timeout."
            self._count_error("judge_errors", WorkflowError(cause, remedy))
        except WorkflowError as error:
            self._count_error("judge_errors", error)

    def _count_error(self, name: str, error: WorkflowError) -> None:
        self.counts[name] += 1
        self.errors.setdefault(name, str(error))

    def _replay_of_parent(self, prompts: Prompts, task: Task, phase: str, parent: Prompts) -> Replay | None:
        """Return the replay with which a candidate repeats its parent's episode up to the first call of a changed role.
        The calls before it need no model. None if the episode cannot be repeated, or if no call would be saved."""
        parent_result = self.result_of(parent, task.id, phase)
        if parent_result is None:
            return None
        old_texts = {part.name: part.now for part in parent.parts}
        changed_roles: set[str] = set()
        for part in prompts.parts:
            if part.now != old_texts.get(part.name):
                changed_roles.update(part.roles)
        calls = self.store.calls(parent_result.episode)
        fork = next((call for call in calls if call.role in changed_roles), None)
        if fork is None or fork is calls[0] or not can_repeat_before(calls, fork):
            return None
        try:
            script = read_script(self.store, parent_result.episode)
        except CotuneError:
            return None  # Its record is not complete, so the candidate runs from the beginning.
        # With parallel calls, the record may still answer calls of a changed role after the fork. These answers were
        # given to the old prompt.
        repeated = script.unaffected_calls(fork.id)
        if any(call.id in repeated and call.role in changed_roles for call in script.calls):
            return None
        return Replay(script=_without_ids_at(script, fork.id), fork=fork.id)

    def _add_result(self, key: RunKey, episode: Episode) -> None:
        result = read_result(self.store, episode)
        self.counts["unmatched"] += sum(result.unmatched.values())
        self._results[key] = result


def check_judge(workflow: Workflow) -> None:
    """Raise ConfigError for a judge that compares episodes with each other."""
    if isinstance(workflow.episode_judge, Ranking):
        raise ConfigError(
            "judge",
            None,
            "compares episodes with each other, and prompts are compared by a number for each",
            "Give the workflow an outcome, or a judge of single episodes.",
        )


def _calls_to_models(episode: Episode, calls: Sequence[CallRecord]) -> Sequence[CallRecord]:
    """Return the calls that were sent to a model: not the call at which an episode diverged from its record."""
    if episode.blame != "divergence":
        return calls
    return [call for call in calls if call.status == "ok"]


def _without_ids_at(script: Script, fork: str) -> Script:
    """Return the script without the token ids of the prompt at the fork: with other prompts they are different."""
    calls: list[ScriptCall] = []
    for call in script.calls:
        if call.id == fork:
            answer = msgspec.structs.replace(call.answer, prompt_ids=())
            call = msgspec.structs.replace(call, answer=answer)
        calls.append(call)
    return msgspec.structs.replace(script, calls=tuple(calls))
