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


class _Records:
    """Holds the records of an episode until it is known whether they are needed."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def write(self, records: Sequence[Record]) -> None:
        self.records += records


async def judge_run(
    workflow: Workflow, judge: EpisodeJudge, store: Store, episode: Episode, responder: Responder, timeout: float
) -> tuple[Episode, str]:
    """Have the workflow's judge give an episode its outcome.

    The calls of the judge go through `responder`, and are stored as an episode of their own if there are any. Returns
    this episode, and the error of the judge; the error is empty if there was none.
    """
    records = _Records()

    async def ask(_: Any) -> None:
        live = current_episode.get()
        assert live is not None
        await judge_episodes(_recorded_in(live, judge), store, [episode], redaction=workflow.redaction)

    outcome = await run_episode(
        replace(workflow, name=f"judge of {workflow.name}", fn=ask, roles=None, prompts=None),
        msgspec.structs.replace(episode.task, id=f"{episode.task.id} (judged)"),
        sink=records,
        responder=responder,
        options=EpisodeOptions(phase=JUDGING, timeout=timeout),
    )
    # Most judges are plain functions, whose episodes would only be in the way.
    if outcome.episode.calls:
        store.write(records.records)
        store.flush()
    return outcome.episode, "" if outcome.error is None else str(outcome.error)


def _recorded_in(live: LiveEpisode, judge: EpisodeJudge) -> EpisodeJudge:
    """The judge, with its calls recorded in `live`. It is called outside of any episode, so that a judge's calls never
    become calls of the episode that it judges."""

    async def finish(opinion: Awaitable[Rewards]) -> Rewards:
        with recording(live):
            return await opinion

    def in_thread(episodes: Sequence[FinishedEpisode], task: Any) -> Rewards | Awaitable[Rewards]:
        with recording(live):
            opinion = judge(episodes, task)
        return finish(opinion) if inspect.isawaitable(opinion) else opinion

    async def on_loop(episodes: Sequence[FinishedEpisode], task: Any) -> Rewards:
        return await finish(cast(Awaitable[Rewards], judge(episodes, task)))

    # An async judge has to stay one: any other function is called in a thread.
    is_async = inspect.iscoroutinefunction(judge) or inspect.iscoroutinefunction(getattr(judge, "__call__", None))  # noqa: B004
    recorded = on_loop if is_async else in_thread
    recorded.__name__ = getattr(judge, "name", getattr(judge, "__name__", "judge"))
    return cast(EpisodeJudge, recorded)
