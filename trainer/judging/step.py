"""Judging the episodes of a step while others are still rolled out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from types import TracebackType

from cotune.errors import WorkflowError
from cotune.judging.episodes import Outcomes, failed_judgements, keep_outcomes, outcomes_of
from cotune.recording.recorder import Responder
from cotune.records.structs import Episode
from cotune.sampling.scoring import Scored
from cotune.trainer.judging.bench import Bench, judging_role
from cotune.trainer.run.run import RolloutRun


def judge_bench(run: RolloutRun, step: int, responder: Responder) -> Bench:
    """The judge of whole episodes for one training step. If the judge is a role, `responder` answers for it.

    The judge is asked once about each task. A judging role that is trained under an independent plan is asked K times,
    so that its own answers can be compared. Under a tree plan, one request has K answers.
    """
    flow = run.workflow
    plan = run.plan
    attempts = 1
    judge_is_trained = judging_role(flow) in run.trained_roles(step)
    if judge_is_trained and plan.kind == "independent":
        attempts = plan.k  # as many as a task has episodes
    return Bench(
        workflow=flow,
        store=run.store,
        responder=responder,
        training_step=step,
        attempts=attempts,
        timeout=run.config.episode_timeout,
    )


class JudgedStep:
    """Has the episodes of a step judged. All episodes of a task are judged together, as soon as the last one has ended.

    Without a judge it does nothing. On leaving the context, judging that still runs is cancelled.
    """

    def __init__(self, bench: Bench) -> None:
        """Judge with the judge, the store and the redaction of `bench`."""
        self._judge = bench.workflow.episode_judge
        self._redaction = bench.workflow.redaction
        self._ask = bench.ask
        self._store = bench.store
        self._expected: dict[str, int] = {}  # the number of episodes of each task
        self._ended: dict[str, list[Episode]] = {}  # the ended episodes of each task
        self._judging: list[asyncio.Task[Outcomes]] = []

    async def __aenter__(self) -> JudgedStep:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._judging:
            task.cancel()
        await asyncio.gather(*self._judging, return_exceptions=True)

    def expect(self, episodes: Mapping[str, int]) -> None:
        """Set the number of episodes that each task, by id, has in this step. When all have ended, they are judged."""
        self._expected.update(episodes)
        for task_id in episodes:
            self._begin(task_id)

    def add_ended(self, episodes: Iterable[Episode]) -> None:
        """Add episodes that have ended before an interruption."""
        for episode in episodes:
            self.ended(episode)

    def ended(self, episode: Episode) -> None:
        """Add an episode that has ended, with or without an error."""
        self._ended.setdefault(episode.task.id, []).append(episode)
        self._begin(episode.task.id)

    async def finish(self) -> Mapping[str, int]:
        """Wait until all episodes are judged and their outcomes are stored. Returns the number of episodes without an
        outcome, by error.

        Raises the error if no episode got an outcome, unless a role of the run judges, which may still have to learn
        it.
        """
        outcomes: dict[str, Scored | WorkflowError] = {}
        for outcomes_of_task in await asyncio.gather(*self._judging):
            outcomes.update(outcomes_of_task)
        return failed_judgements(outcomes, self._ask)

    def _begin(self, task_id: str) -> None:
        """Begin to judge a task if all of its episodes have ended."""
        episodes = self._ended.get(task_id, [])
        if self._judge is not None and len(episodes) == self._expected.get(task_id):
            ordered = sorted(episodes, key=lambda episode: episode.rollout)
            self._judging.append(asyncio.create_task(self._judge_task(ordered)))

    async def _judge_task(self, episodes: list[Episode]) -> Outcomes:
        """Have the episodes of a task judged, and store their outcomes."""
        await asyncio.to_thread(self._store.flush)  # the judge reads their calls
        outcomes = await outcomes_of(self._judge, self._store, episodes, self._ask, self._redaction)
        await asyncio.to_thread(keep_outcomes, self._store, outcomes, self._redaction)
        return outcomes
