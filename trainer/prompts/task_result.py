"""The result of a candidate on one task: the outcome of its episode, the rewards of its roles, and unmatched edits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

import msgspec

from cotune.records.ids import candidate_id
from cotune.records.structs import CallRecord, Episode
from cotune.storage.protocol import Store


class TaskResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one episode. `outcome` is the sum of its rewards; None if it failed or the outcome is not known."""

    episode: str
    task: str
    outcome: float | None
    rewards: Mapping[str, float]
    """The rewards of the episode, by name."""
    by_role: Mapping[str, float]
    """Mean score of each role's answers by its own scorer; only roles with a scorer."""
    error: str = ""
    unmatched: Mapping[str, int] = {}
    """By role, the number of calls without the text that the edits replace."""
    prompt_tokens: int = 0
    """Prompt tokens of the calls that a model has answered."""
    calls: int = 0

    def score(self, weight: float, floor: float) -> float:
        """Return the score that the search maximizes: the outcome, or `floor` without one, plus `weight` times the mean
        score of the roles."""
        score = floor if self.outcome is None else self.outcome
        if self.by_role and weight:
            score += weight * fmean(self.by_role.values())
        return score


def read_result(store: Store, episode: Episode) -> TaskResult:
    """Read the result of an episode from the store."""
    calls = store.calls(episode.id, lean=True)
    answers: dict[str, str] = {}  # the role of each chosen answer
    for call in calls:
        if call.status == "ok" and call.chosen is not None:
            answers[candidate_id(call.id, call.chosen)] = call.role
    rewards = store.rewards([episode.id, *answers])
    scores: dict[str, list[float]] = {}
    for answer, role in answers.items():
        if answer_rewards := rewards.get(answer):
            scores.setdefault(role, []).append(sum(answer_rewards.values()))
    episode_rewards = dict(rewards.get(episode.id) or {})
    return TaskResult(
        episode=episode.id,
        task=episode.task.id,
        outcome=sum(episode_rewards.values()) if episode.status == "ok" and episode_rewards else None,
        rewards=episode_rewards,
        by_role={role: fmean(role_scores) for role, role_scores in scores.items()},
        error="" if episode.status == "ok" else episode.error or episode.status,
        unmatched=count_unedited(calls),
        prompt_tokens=sum(call.prompt_tokens or call.usage.prompt_tokens for call in calls),
        calls=len(calls),
    )


def count_unedited(calls: Sequence[CallRecord]) -> Mapping[str, int]:
    """Count, by role, the calls that were sent without the edits of their role."""
    counts: dict[str, int] = {}
    for call in calls:
        if call.unedited and call.replayed is None:
            counts[call.role] = counts.get(call.role, 0) + 1
    return counts
