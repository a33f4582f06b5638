"""What is known of one episode of a candidate: its outcome, the rewards of its roles, and what did not match."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

import msgspec

from cotune.records.ids import candidate_id
from cotune.records.structs import CallRecord, Episode
from cotune.storage.protocol import Store


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """One episode. `outcome` is the sum of its rewards, None where it failed or nobody knows it."""

    episode: str
    task: str
    outcome: float | None
    rewards: Mapping[str, float]
    """Of the episode, by name."""
    by_role: Mapping[str, float]
    """Mean over the role's answers of what its own scorer gave them, for each role that has one."""
    error: str = ""
    unmatched: Mapping[str, int] = {}
    """Calls of edited roles to which the edits did not apply, by role."""
    prompt_tokens: int = 0
    """Of the calls that a model has answered."""
    calls: int = 0

    def score(self, weight: float, floor: float) -> float:
        """What the search climbs: the outcome, or `floor` without one, and a share of the roles' own scores."""
        own = weight * fmean(self.by_role.values()) if self.by_role and weight else 0.0
        return (floor if self.outcome is None else self.outcome) + own


def read_tried(store: Store, episode: Episode) -> Tried:
    """The episode as the store has it."""
    calls = store.calls(episode.id, lean=True)
    answered = [call for call in calls if call.status == "ok" and call.chosen is not None]
    targets = {call.id: candidate_id(call.id, call.chosen or 0) for call in answered}
    rewards = store.rewards([episode.id, *targets.values()])
    named = dict(rewards.get(episode.id) or {})
    return Tried(
        episode=episode.id,
        task=episode.task.id,
        outcome=sum(named.values()) if episode.status == "ok" and named else None,
        rewards=named,
        by_role=_by_role((call.role, rewards.get(targets[call.id]) or {}) for call in answered),
        error="" if episode.status == "ok" else episode.error or episode.status,
        unmatched=unmatched(calls),
        prompt_tokens=sum(call.prompt_tokens or call.usage.prompt_tokens for call in calls),
        calls=len(calls),
    )


def unmatched(calls: Sequence[CallRecord]) -> Mapping[str, int]:
    """Calls of roles with edits that went out as they were, by role."""
    found: dict[str, int] = {}
    for call in calls:
        if call.unedited and call.replayed is None:
            found[call.role] = found.get(call.role, 0) + 1
    return found


def _by_role(scored: Iterable[tuple[str, Mapping[str, float]]]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for role, rewards in scored:
        if rewards:
            values.setdefault(role, []).append(sum(rewards.values()))
    return {role: fmean(of) for role, of in values.items()}
