"""Judging the episodes of a step while others are still rolled out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from types import TracebackType

from cotune.judging.episodes import Outcomes, keep_outcomes, outcomes_of, refusals
from cotune.records.structs import Episode, PolicyRef
from cotune.trainer.rollout.episodes import answering
from cotune.trainer.rollout.judging import Bench, judging_role
from cotune.trainer.run.run import RolloutRun


def judge_bench(run: RolloutRun, step: int, policies: Mapping[str, PolicyRef]) -> Bench:
    """How the workflow's judge is asked in a step in which these policies answer by role.

    If the judge is a role that is trained, it is asked about each task as often as the task has episodes, so that its
    own episodes can be compared; otherwise once.
    """
    flow, plan = run.workflow, run.plan
    compared = plan.kind == "independent" and judging_role(flow) in run.trained_roles(step)
    return Bench(
        workflow=flow,
        store=run.store,
        responder=answering(run, plan, policies).responder(run.sampler, run.chats, flow),
        training_step=step,
        attempts=plan.k if compared else 1,
        timeout=run.config.episode_timeout,
    )


class JudgedStep:
    """Has the episodes of a step judged, those of a task as soon as all of them have ended; nothing without a judge.

    Leaving it cancels what is under way.
    """

    def __init__(self, bench: Bench) -> None:
        self._judge = bench.workflow.episode_judge
        self._redaction = bench.workflow.redaction
        self._ask = bench.ask
        self._store = bench.store
        self._expected: dict[str, int] = {}
        self._ended: dict[str, list[Episode]] = {}
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
        """Tasks, by id, have so many episodes in this step: with the last of them the judging of a task begins."""
        self._expected.update(episodes)
        for task_id in episodes:
            self._begin(task_id)

    def already(self, episodes: Iterable[Episode]) -> None:
        """These have ended before an interruption."""
        for episode in episodes:
            self.ended(episode)

    def ended(self, episode: Episode) -> None:
        """An episode has ended, well or not."""
        self._ended.setdefault(episode.task.id, []).append(episode)
        self._begin(episode.task.id)

    async def finish(self) -> Mapping[str, int]:
        """Wait for all outcomes; returns the number of episodes that got none, by the error. Raises that error where
        it is of all of them, as `judge_episodes` does."""
        found = await asyncio.gather(*self._judging)
        return refusals({episode: outcome for some in found for episode, outcome in some.items()}, self._ask)

    def _begin(self, task_id: str) -> None:
        together = self._ended.get(task_id, [])
        if self._judge is not None and len(together) == self._expected.get(task_id):
            ordered = sorted(together, key=lambda episode: episode.rollout)
            self._judging.append(asyncio.create_task(self._outcomes(ordered)))

    async def _outcomes(self, together: list[Episode]) -> Outcomes:
        await asyncio.to_thread(self._store.flush)
        outcomes = await outcomes_of(self._judge, self._store, together, self._ask, self._redaction)
        await asyncio.to_thread(keep_outcomes, self._store, outcomes, self._redaction)
        return outcomes
