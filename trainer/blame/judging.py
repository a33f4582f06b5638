"""Asks the workflow's judge for the outcome of a run, and records the calls that the judge makes."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import msgspec

from cotune.episodes.episode import EpisodeOptions, run_episode
from cotune.episodes.workflows import Workflow
from cotune.judging.episodes import EpisodeJudge, FinishedEpisode, judge_episodes
from cotune.recording.context import current_episode, recording
from cotune.recording.recorder import LiveEpisode, Responder
from cotune.records.structs import JUDGING, Episode, Record
from cotune.sampling.scoring import Rewards
from cotune.storage.protocol import Store


@dataclass
class JudgeCalls:
    """The calls that the judge has made, in all episodes together."""

    episodes: int = 0
    """Episodes for which it made calls."""
    calls: int = 0
    cost: float = 0.0
    unpriced: int = 0
    """Calls whose model has no price, or that report no tokens."""

    @property
    def calls_per_episode(self) -> float:
        return self.calls / self.episodes if self.episodes else 0.0

    @property
    def cost_per_episode(self) -> float:
        return self.cost / self.episodes if self.episodes else 0.0


class _BufferedSink:
    """Keeps the records of an episode in memory until it is known whether they are needed."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def write(self, records: Sequence[Record]) -> None:
        self.records += records


async def judge_run(
    workflow: Workflow, judge: EpisodeJudge, store: Store, episode: Episode, responder: Responder, timeout: float
) -> tuple[Episode, str]:
    """Have the workflow's judge give `episode` its outcome, as an episode of its own that makes the calls of the judge.

    The calls of the judge go through `responder`. Returns the judge's episode, and the error of the judge ("" without
    one). The judge's episode is stored if it has calls.
    """
    sink = _BufferedSink()

    async def ask_judge(_task: Any) -> None:
        live = current_episode.get()
        assert live is not None
        await judge_episodes(_recorded_in(live, judge), store, [episode], redaction=workflow.redaction)

    outcome = await run_episode(
        replace(workflow, name=f"judge of {workflow.name}", fn=ask_judge, roles=None, prompts=None),
        msgspec.structs.replace(episode.task, id=f"{episode.task.id} (judged)"),
        sink=sink,
        responder=responder,
        options=EpisodeOptions(phase=JUDGING, timeout=timeout),
    )
    # Most judges are plain functions without calls. Their episodes would only clutter the records.
    if outcome.episode.calls:
        store.write(sink.records)
        store.flush()
    return outcome.episode, "" if outcome.error is None else str(outcome.error)


def _recorded_in(live: LiveEpisode, judge: EpisodeJudge) -> EpisodeJudge:
    """The judge as a function whose calls are recorded in `live`.

    `judge_episodes` calls judges outside of any episode, so that their calls never become calls of the episode that
    they judge. The returned function enters `live` for the judge.
    """

    async def await_in_episode(rewards: Awaitable[Rewards]) -> Rewards:
        with recording(live):
            return await rewards

    def plain_judge(episodes: Sequence[FinishedEpisode], task: Any) -> Rewards | Awaitable[Rewards]:
        with recording(live):
            rewards = judge(episodes, task)
        return await_in_episode(rewards) if inspect.isawaitable(rewards) else rewards

    async def async_judge(episodes: Sequence[FinishedEpisode], task: Any) -> Rewards:
        return await await_in_episode(cast(Awaitable[Rewards], judge(episodes, task)))

    # `judge_episodes` calls async judges on the loop and all others in a thread, so an async judge has to stay async.
    is_async = inspect.iscoroutinefunction(judge) or inspect.iscoroutinefunction(getattr(judge, "__call__", None))  # noqa: B004
    recorded = async_judge if is_async else plain_judge
    recorded.__name__ = getattr(judge, "name", getattr(judge, "__name__", "judge"))
    return cast(EpisodeJudge, recorded)
