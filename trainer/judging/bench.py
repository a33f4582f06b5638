"""Judging whole episodes. If the judge is a role of the run, its own calls are recorded as an episode too."""

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
from cotune.runtime.user_code import context_value
from cotune.sampling.scoring import Scored
from cotune.storage.protocol import Store


def judging_role(workflow: Workflow) -> str:
    """Return the role that judges the workflow's episodes; an empty text if the judge is not a role."""
    from cotune.integrations.judging.judge import Judge

    judge = workflow.episode_judge
    if isinstance(judge, Judge) and judge.role:
        return judge.role
    return ""


@dataclass(kw_only=True)
class Bench:
    """Lets the judge of `workflow` compare episodes.

    If the judge is a role, each task is judged `attempts` times, and the mean counts. Each attempt is an episode of its
    own, and is added to `episodes`. If the judge's role has a scorer, its outcome is the mean of the
    rewards that the scorer gives to the answers in it.
    """

    workflow: Workflow
    store: Store
    responder: Responder
    training_step: int | None = None
    attempts: int = 1
    timeout: float | None = None
    offline: bool = False
    """Whether this is a dry run, in which the judge's opinions are invented."""
    episodes: list[Episode] = field(default_factory=list)

    @property
    def ask(self) -> AskJudge:
        """The function that `judge_episodes` calls to ask the judge."""
        return self._ask_in_episodes if judging_role(self.workflow) else ask_judge

    async def _ask_in_episodes(self, judge: EpisodeJudge, finished: Sequence[FinishedEpisode], task: Task) -> Opinion:
        """Ask the judge in all attempts at the same time, and return the mean of its opinions."""
        attempts = [self._ask_in_episode(judge, finished, task, attempt) for attempt in range(self.attempts)]
        opinions = await asyncio.gather(*attempts)
        # An opinion has a score, or an error, for each episode.
        return [_mean_score(scores_of_episode) for scores_of_episode in zip(*opinions, strict=True)]

    async def _ask_in_episode(
        self, judge: EpisodeJudge, finished: Sequence[FinishedEpisode], task: Task, attempt: int
    ) -> Opinion:
        """Ask the judge once, in an episode of its own, so that the calls of a judging role are recorded and can be
        trained on.

        Returns the judge's score of each finished episode, or its error for all of them.
        """
        opinions: list[Opinion] = []

        async def judge_finished(_: Any) -> None:
            # The judge's calls belong to this episode, and not to the ones that it compares.
            with context_value(judging, judging.get()._replace(episode=current_episode.get())):
                opinions.append(await ask_judge(judge, finished, task))

        judging_workflow = replace(self.workflow, name=f"judge of {self.workflow.name}", fn=judge_finished, roles=None)
        options = EpisodeOptions(
            phase=JUDGING,
            training_step=self.training_step,
            rollout=attempt,
            timeout=self.timeout,
            offline=self.offline,
        )
        outcome = await run_episode(
            judging_workflow,
            msgspec.structs.replace(task, id=f"{task.id} (judged)"),
            sink=self.store,
            responder=self.responder,
            options=options,
        )
        self.store.flush()
        if outcome.episode.calls:
            self.episodes.append(outcome.episode)
            self._reward_judging(outcome.episode)
        if opinions and outcome.error is None:
            return opinions[0]
        error = outcome.error or WorkflowError("The episode judge gave no answer.")
        return [WorkflowError(error.cause, error.remedy)] * len(finished)

    def _reward_judging(self, episode: Episode) -> None:
        """Reward an episode of judging by the mean of the rewards of its answers."""
        answered = [call for call in self.store.calls(episode.id) if call.chosen is not None]
        rewards = self.store.rewards(candidate_id(call.id, call.chosen or 0) for call in answered)
        self.store.write(reward_records(episode.id, _mean_rewards(rewards.values())))
        self.store.flush()


def _mean_score(attempts: Sequence[Scored | WorkflowError]) -> Scored | WorkflowError:
    """Return the mean of the scores of one episode; the first error if there are no scores."""
    scores: list[Scored] = []
    errors: list[WorkflowError] = []
    for result in attempts:
        if isinstance(result, WorkflowError):
            errors.append(result)
        else:
            scores.append(result)
    if not scores:
        return errors[0]
    text = "\n".join(dict.fromkeys(score.text for score in scores if score.text))
    return Scored(_mean_rewards([score.rewards for score in scores]), text)


def _mean_rewards(all_rewards: Collection[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each component over the rewards that have it, sorted by name."""
    values: dict[str, list[float]] = {}
    for rewards in all_rewards:
        for name, value in rewards.items():
            values.setdefault(name, []).append(value)
    return {name: fmean(values[name]) for name in sorted(values)}
