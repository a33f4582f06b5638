"""Episode judges: finished episodes of one task are compared, and each gets its outcome, after it has ended."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from cotune.errors import RecordError, WorkflowError
from cotune.judging.shown import shown_message, shown_messages
from cotune.recording.context import Judging, judging
from cotune.recording.redaction import Redaction
from cotune.recording.rewards import reward_records
from cotune.records.structs import JUDGING, CallRecord, Candidate, Episode, Task
from cotune.runtime.user_code import setting
from cotune.sampling.scoring import Rewards, Scored, compare
from cotune.storage.protocol import Store


class FinishedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a finished episode, as scorers see calls, with its candidates; `answer` is the chosen one."""

    id: str
    role: str
    step: int
    turn: int
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    model: str
    params: dict[str, Any]
    parents: tuple[str, ...]
    task: Task
    candidates: tuple[Candidate, ...]
    chosen: int

    @property
    def state(self) -> Any:
        """Only calls of a running episode have one: it can be large and private. Raises WorkflowError."""
        raise WorkflowError(
            f"The scorer of {self.role} reads call.state, which records do not have.",
            "Read it from call.messages, or put it into the task.",
        )

    @property
    def answer(self) -> Candidate:
        return self.candidates[self.chosen]


class FinishedEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """An episode that has ended well, with its outcome and its answered calls, in the order in which they began."""

    id: str
    task: Task
    rewards: Mapping[str, float]
    metrics: Mapping[str, float]
    calls: tuple[FinishedCall, ...]

    @property
    def transcript(self) -> str:
        """The conversation as text: each message once, each answer under its role."""
        shown: set[str] = set()
        lines: list[str] = []
        for call in self.calls:
            heard = [text for message in call.messages if (text := shown_messages([message])) not in shown]
            lines += [*heard, f"[{call.role} answers]\n{shown_message(call.answer.message)}"]
            shown.update([*heard, shown_messages([{**call.answer.message, "role": "assistant"}])])
        return "\n\n".join(lines) or "(nothing was said)"


EpisodeJudge = Callable[[Sequence[FinishedEpisode], Any], Rewards | Awaitable[Rewards]]
"""`(episodes, task)` -> the outcome of each episode, in their order, or None for one that gets none."""


class Ranking:
    """A judge whose reward, under `name`, is the share of the other episodes that an episode is better than. Those that
    the policy failed are among the others: it is better than all of them."""

    name: str


Opinion = Sequence[Scored | WorkflowError]
"""The outcome of each episode of a task, without rewards for one that gets none, or why the judge could not say."""
AskJudge = Callable[[EpisodeJudge, Sequence[FinishedEpisode], Task], Awaitable[Opinion]]
Outcomes = Mapping[str, Scored | WorkflowError]
"""Rewards of episodes by id, with the text beside them, or why there are none."""


async def ask_judge(judge: EpisodeJudge, episodes: Sequence[FinishedEpisode], task: Task) -> Opinion:
    """A judge's opinion of episodes of one task; a plain number is the reward `team`."""
    return await compare(judge, episodes, (task.input,), "The episode judge", task.id, "team")


def finished(store: Store, episode: Episode) -> FinishedEpisode:
    """A stored episode with its answered calls. Raises RecordError where a message was lost."""
    calls = [call for call in store.calls(episode.id) if call.status == "ok" and call.candidates]
    return FinishedEpisode(
        id=episode.id,
        task=episode.task,
        rewards=dict(store.rewards([episode.id]).get(episode.id) or {}),
        metrics=episode.metrics,
        calls=tuple(finished_call(store, call, episode.task) for call in calls),
    )


def finished_call(store: Store, call: CallRecord, task: Task) -> FinishedCall:
    """A stored call that was answered. Raises RecordError where a message was lost."""
    same = ("id", "role", "step", "turn", "model", "params", "parents", "candidates")
    return FinishedCall(
        **{name: getattr(call, name) for name in same},
        messages=[store.message(name) for name in call.messages],
        tools=store.message(call.tools) if call.tools else None,
        task=task,
        chosen=call.chosen or 0,
    )


async def judge_episodes(
    judge: EpisodeJudge,
    store: Store,
    episodes: Iterable[Episode],
    ask: AskJudge = ask_judge,
    redaction: Redaction | None = None,
) -> Mapping[str, int]:
    """Ask for the outcomes of the episodes that ended well, those of a task together, and store them. What the judge
    says of them is redacted.

    Returns the number of episodes that got none, by the error, where there was one. Raises that error where it is of
    all of them, unless the judge is a role of the run (`ask`), which may have to learn to judge.
    """
    outcomes = await outcomes_of(judge, store, episodes, ask, redaction)
    keep_outcomes(store, outcomes, redaction)
    return refusals(outcomes, ask)


def keep_outcomes(store: Store, outcomes: Outcomes, redaction: Redaction | None = None) -> None:
    """Store the outcomes that were given."""
    for episode_id, outcome in outcomes.items():
        if not isinstance(outcome, WorkflowError):
            store.write(reward_records(episode_id, *outcome, redaction=redaction))
    store.flush()


def refusals(outcomes: Outcomes, ask: AskJudge = ask_judge) -> Mapping[str, int]:
    """The number of episodes that got no outcome, by the error. Raises as `judge_episodes` does."""
    errors = [outcome for outcome in outcomes.values() if isinstance(outcome, WorkflowError)]
    if errors and len(errors) == len(outcomes) and ask is ask_judge:
        raise errors[0]
    return Counter(map(str, errors))


async def outcomes_of(
    judge: EpisodeJudge | None,
    store: Store,
    episodes: Iterable[Episode],
    ask: AskJudge = ask_judge,
    redaction: Redaction | None = None,
) -> Outcomes:
    """The outcomes of the episodes that ended well, by id, or why there is none; nothing without a judge, and of
    episodes of judging."""
    by_task: dict[str, list[Episode]] = {}
    for episode in episodes:
        if episode.is_outcome and episode.phase != JUDGING and judge is not None:
            by_task.setdefault(episode.task.id, []).append(episode)
    with setting(judging, Judging(redaction=redaction)):
        work = (_outcomes(judge, store, together, ask) for together in by_task.values() if judge)
        found = await asyncio.gather(*work)
    return {episode: outcome for some in found for episode, outcome in some.items()}


async def _outcomes(judge: EpisodeJudge, store: Store, ended: Sequence[Episode], ask: AskJudge) -> Outcomes:
    together = [episode for episode in ended if episode.status == "ok"]
    if not together:
        return {}
    task = together[0].task
    try:
        seen = [finished(store, episode) for episode in together]
    except RecordError as error:
        return dict.fromkeys((episode.id for episode in together), WorkflowError(error.cause, error.remedy))
    found = await ask(judge, seen, task)
    if isinstance(judge, Ranking):
        found = [_above(outcome, judge.name, len(seen) - 1, len(ended) - len(seen)) for outcome in found]
    given = (name for outcome in found if isinstance(outcome, Scored) for name in outcome.rewards)
    name = next(given, getattr(judge, "name", getattr(judge, "__name__", "judge")))
    found = [outcome._replace(name=name) if isinstance(outcome, Scored) else outcome for outcome in found]
    return {episode.id: outcome for episode, outcome in zip(together, found, strict=True)}


def _above(outcome: Scored | WorkflowError, name: str, others: int, failed: int) -> Scored | WorkflowError:
    """The outcome with its rank, a share of `others`, as one of those and the `failed`, which it is better than."""
    if isinstance(outcome, WorkflowError) or not failed or (others and name not in outcome.rewards):
        return outcome
    rank = (outcome.rewards.get(name, 0.0) * others + failed) / (others + failed)
    return outcome._replace(rewards={**outcome.rewards, name: rank})
