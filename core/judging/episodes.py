"""Episode judges: they compare the finished episodes of one task and give each its outcome."""

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
from cotune.runtime.user_code import context_value
from cotune.sampling.scoring import Rewards, Scored, compare
from cotune.storage.protocol import Store


class FinishedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a finished episode in the form for scorers, with its candidates. `answer` is the chosen one."""

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
        """Raises WorkflowError: only calls of a running episode have a state, as it can be large and private."""
        raise WorkflowError(
            f"The scorer of {self.role} reads call.state, which records do not have.",
            "Read it from call.messages, or put it into the task.",
        )

    @property
    def answer(self) -> Candidate:
        return self.candidates[self.chosen]


class FinishedEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """An episode that ended without an error, with its outcome and its answered calls in the order of their starts."""

    id: str
    task: Task
    rewards: Mapping[str, float]
    metrics: Mapping[str, float]
    calls: tuple[FinishedCall, ...]

    @property
    def transcript(self) -> str:
        """The conversation as text: each message once, each answer under its role."""
        already_shown: set[str] = set()
        parts: list[str] = []
        for call in self.calls:
            texts = [shown_messages([message]) for message in call.messages]
            new_texts = [text for text in texts if text not in already_shown]
            parts += [*new_texts, f"[{call.role} answers]\n{shown_message(call.answer.message)}"]
            already_shown.update(new_texts)
            # The answer may come back as an assistant message of a later call.
            already_shown.add(shown_messages([{**call.answer.message, "role": "assistant"}]))
        return "\n\n".join(parts) or "(nothing was said)"


EpisodeJudge = Callable[[Sequence[FinishedEpisode], Any], Rewards | Awaitable[Rewards]]
"""`(episodes, task)` -> the outcomes in the order of the episodes, None for an episode without one."""


class Ranking:
    """A judge whose reward, under `name`, is the share of the other episodes that an episode is better than. A finished
    episode is better than all episodes that the policy failed."""

    name: str


Opinion = Sequence[Scored | WorkflowError]
"""The outcome of each episode of a task (without rewards if it gets none), or the error of the judge."""
AskJudge = Callable[[EpisodeJudge, Sequence[FinishedEpisode], Task], Awaitable[Opinion]]
Outcomes = Mapping[str, Scored | WorkflowError]
"""Rewards of episodes with their texts, by id, or the error of the judge."""


async def ask_judge(judge: EpisodeJudge, episodes: Sequence[FinishedEpisode], task: Task) -> Opinion:
    """A judge's opinion of episodes of one task; a plain number is the reward `team`."""
    return await compare(judge, episodes, (task.input,), "The episode judge", task.id, "team")


def finished(store: Store, episode: Episode) -> FinishedEpisode:
    """A stored episode with its answered calls. Raises RecordError if a message was lost."""
    calls = [call for call in store.calls(episode.id) if call.status == "ok" and call.candidates]
    return FinishedEpisode(
        id=episode.id,
        task=episode.task,
        rewards=dict(store.rewards([episode.id]).get(episode.id) or {}),
        metrics=episode.metrics,
        calls=tuple(finished_call(store, call, episode.task) for call in calls),
    )


def finished_call(store: Store, call: CallRecord, task: Task) -> FinishedCall:
    """A stored call that was answered. Raises RecordError if a message was lost."""
    copied = ("id", "role", "step", "turn", "model", "params", "parents", "candidates")
    return FinishedCall(
        **{name: getattr(call, name) for name in copied},
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
    """Ask the judge for the outcomes of the finished episodes, and store them. The judge gets all episodes of a task in
    one question. Its texts are redacted.

    Returns the number of episodes whose judging failed, by error. With the default `ask`, this raises the error if
    judging failed for all episodes. With another `ask`, a policy of the run is the judge: it may fail for all episodes
    at first, and learn to judge.
    """
    outcomes = await outcomes_of(judge, store, episodes, ask, redaction)
    keep_outcomes(store, outcomes, redaction)
    return failed_judgements(outcomes, ask)  # raises if judging failed for all episodes


def keep_outcomes(store: Store, outcomes: Outcomes, redaction: Redaction | None = None) -> None:
    """Store the outcomes of episodes whose judging did not fail."""
    for episode_id, outcome in outcomes.items():
        if not isinstance(outcome, WorkflowError):
            store.write(reward_records(episode_id, *outcome, redaction=redaction))
    store.flush()


def failed_judgements(outcomes: Outcomes, ask: AskJudge = ask_judge) -> Mapping[str, int]:
    """The number of episodes whose judging failed, by error. Raises as `judge_episodes` does."""
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
    """Ask the workflow's judge about finished episodes, task by task. Returns the outcome of each episode by id, or the
    judge's error. Without a judge, the result is empty.

    Only episodes whose end says something about the policies are judged: not cancelled ones, and none that the
    infrastructure failed.
    """
    outcomes: dict[str, Scored | WorkflowError] = {}
    if judge is None:
        return outcomes
    by_task: dict[str, list[Episode]] = {}
    for episode in episodes:
        if episode.is_outcome and episode.phase != JUDGING:  # in that phase, the judge itself was asked
            by_task.setdefault(episode.task.id, []).append(episode)
    with context_value(judging, Judging(redaction=redaction)):
        work = [_outcomes_of_task(judge, store, of_task, ask) for of_task in by_task.values()]
        for outcomes_of_task in await asyncio.gather(*work):
            outcomes.update(outcomes_of_task)
    return outcomes


async def _outcomes_of_task(
    judge: EpisodeJudge, store: Store, ended_episodes: Sequence[Episode], ask: AskJudge
) -> Outcomes:
    """The outcomes that the judge gives to the episodes of one task, by episode. It sees only episodes without an
    error; the failed ones get no outcome."""
    successful = [episode for episode in ended_episodes if episode.status == "ok"]
    if not successful:
        return {}
    task = successful[0].task
    try:
        shown = [finished(store, episode) for episode in successful]
    except RecordError as error:
        return dict.fromkeys((episode.id for episode in successful), WorkflowError(error.cause, error.remedy))
    judged = await ask(judge, shown, task)
    if isinstance(judge, Ranking):
        n_failed = len(ended_episodes) - len(shown)
        judged = [_rank_above_failed(outcome, judge.name, len(shown) - 1, n_failed) for outcome in judged]

    # A text is stored under the name of a reward. An episode without a reward gets the name that the others have.
    text_name = _name_of_reward(judge, judged)
    outcomes: dict[str, Scored | WorkflowError] = {}
    for episode, outcome in zip(successful, judged, strict=True):
        if isinstance(outcome, Scored):
            outcome = outcome._replace(name=text_name)
        outcomes[episode.id] = outcome
    return outcomes


def _name_of_reward(judge: EpisodeJudge, judged: Opinion) -> str:
    """The name of the first reward that a judge gave. If it gave none, the name of the judge."""
    for outcome in judged:
        if isinstance(outcome, Scored) and outcome.rewards:
            return next(iter(outcome.rewards))
    name_of_function = getattr(judge, "__name__", "judge")
    return str(getattr(judge, "name", name_of_function))


def _rank_above_failed(
    outcome: Scored | WorkflowError, name: str, n_judged_others: int, n_failed: int
) -> Scored | WorkflowError:
    """The outcome of a judged episode, with a rank that also counts the failed episodes of its task.

    The rank is the reward `name`: the share of the other episodes that this one is better than. The judge has compared
    it with `n_judged_others`. It is better than each of the `n_failed` episodes, which the judge did not see.
    """
    if isinstance(outcome, WorkflowError) or n_failed == 0:
        return outcome
    rank_among_judged = outcome.rewards.get(name)
    if rank_among_judged is None:
        if n_judged_others > 0:  # the judge gave no rank
            return outcome
        rank_among_judged = 0.0  # there was nothing to compare
    n_worse = rank_among_judged * n_judged_others + n_failed
    rank = n_worse / (n_judged_others + n_failed)
    return outcome._replace(rewards={**outcome.rewards, name: rank})
