"""Judging whole episodes; what a judge that is a role of the run is asked and answers is an episode of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import msgspec

from cotune.episodes.episode import EpisodeOptions, run_episode
from cotune.episodes.workflows import Workflow
from cotune.errors import WorkflowError
from cotune.judging.episodes import AskJudge, EpisodeJudge, FinishedEpisode, Opinion, ask_judge
from cotune.recording.context import current_episode, judging
from cotune.recording.recorder import Responder
from cotune.recording.rewards import reward_records
from cotune.records.ids import candidate_id
from cotune.records.structs import JUDGING, Episode, Task
from cotune.runtime.user_code import setting
from cotune.sampling.scoring import Scored
from cotune.storage.protocol import Store


def judging_role(workflow: Workflow) -> str:
    """The role that judges the workflow's episodes; "" where that is no role."""
    from cotune.integrations.judging.judge import Judge

    judge = workflow.episode_judge
    return (judge.role or "") if isinstance(judge, Judge) else ""


@dataclass(kw_only=True)
class Bench:
    """Lets the judge of `workflow` compare episodes. Where it is a role, each task is judged `attempts` times, each in
    an episode of its own, and the mean counts; `episodes` are those.

    The outcome of such an episode is what the scorer of the judge's role, if it has one, gives the answers in it.
    """

    workflow: Workflow
    store: Store
    responder: Responder
    training_step: int | None = None
    attempts: int = 1
    timeout: float | None = None
    offline: bool = False
    """Whether this is a dry run, in which a judge makes its opinion up."""
    episodes: list[Episode] = field(default_factory=list)

    @property
    def ask(self) -> AskJudge:
        """How `judge_episodes` is to ask the judge."""
        return self._in_episodes if judging_role(self.workflow) else ask_judge

    async def _in_episodes(self, judge: EpisodeJudge, seen: Sequence[FinishedEpisode], task: Task) -> Opinion:
        return _mean([*await asyncio.gather(*(self._once(judge, seen, task, n) for n in range(self.attempts)))])

    async def _once(self, judge: EpisodeJudge, seen: Sequence[FinishedEpisode], task: Task, attempt: int) -> Opinion:
        said: list[Opinion] = []

        async def compare_them(_: Any) -> None:
            with setting(judging, judging.get()._replace(episode=current_episode.get())):
                said.append(await ask_judge(judge, seen, task))

        outcome = await run_episode(
            replace(self.workflow, name=f"judge of {self.workflow.name}", fn=compare_them, roles=None),
            msgspec.structs.replace(task, id=f"{task.id} (judged)"),
            sink=self.store,
            responder=self.responder,
            options=EpisodeOptions(
                phase=JUDGING,
                training_step=self.training_step,
                rollout=attempt,
                timeout=self.timeout,
                offline=self.offline,
            ),
        )
        self.store.flush()
        if outcome.episode.calls:
            self.episodes.append(outcome.episode)
            self._reward(outcome.episode)
        if said and outcome.error is None:
            return said[0]
        error = outcome.error or WorkflowError("The episode judge gave no answer.")
        return [WorkflowError(error.cause, error.remedy)] * len(seen)

    def _reward(self, episode: Episode) -> None:
        """Give an episode of judging the mean of its answers' own rewards."""
        answered = [call for call in self.store.calls(episode.id) if call.chosen is not None]
        given = self.store.rewards(candidate_id(call.id, call.chosen or 0) for call in answered)
        self.store.write(reward_records(episode.id, _means(given.values())))
        self.store.flush()


def _mean(opinions: Sequence[Opinion]) -> Opinion:
    """For each episode the mean of what those attempts say that say something, and their reasons; an error where none
    does."""
    return [_mean_of(said) for said in zip(*opinions, strict=True)]


def _mean_of(said: Sequence[Scored | WorkflowError]) -> Scored | WorkflowError:
    opinions = [one for one in said if not isinstance(one, WorkflowError)]
    if not opinions:
        return next(error for error in said if isinstance(error, WorkflowError))
    text = "\n".join(dict.fromkeys(one.text for one in opinions if one.text))
    return Scored(_means([one.rewards for one in opinions]), text)


def _means(given: Collection[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each component over those that have it."""
    names = sorted({name for rewards in given for name in rewards})
    return {name: fmean(rewards[name] for rewards in given if name in rewards) for name in names}
