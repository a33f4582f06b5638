"""Counts what an evaluation records, on its way to the store, and what that took: calls, tokens, time and money."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from cotune.algorithms.goal import NO_ROLE, Played, single_sample
from cotune.algorithms.samples import Sample
from cotune.intervals import Interval
from cotune.reading.evaluations import TaskEnding
from cotune.recording.recorder import Sink
from cotune.records.structs import CallRecord, Episode, Record, RewardRecord, candidate_id
from cotune.trainer.evaluation.modes import Prices
from cotune.trainer.evaluation.statistics import mean

MILLION = 1_000_000


class TokenCounts(msgspec.Struct, kw_only=True):
    """Calls and tokens of one policy, or of one model of the application's own provider."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    uncounted: int = 0
    """Calls whose provider reported no tokens."""

    def add(self, call: CallRecord) -> None:
        """One more call with an answer; tokens are the engine's own, or as the provider reports them."""
        prompt = call.prompt_tokens or call.usage.prompt_tokens
        written = sum(len(candidate.token_ids) for candidate in call.candidates) or call.usage.completion_tokens
        self.calls += 1
        self.prompt_tokens += prompt
        self.completion_tokens += written
        self.uncounted += not prompt and not written


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """What the episodes of an evaluation took, in all. `seconds` is the mean of an episode.

    `cost` is what calls with a price came to, None without any; `unpriced` counts the others.
    """

    calls: int
    prompt_tokens: int
    completion_tokens: int
    uncounted: int
    seconds: Interval | None
    cost: float | None = None
    unpriced: int = 0


class RoleStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What one role did. Means are per answered call; `turns` is per episode in which the role took part."""

    calls: int
    failed: int
    turns: float
    prompt_tokens: float
    completion_tokens: float
    truncated: float
    """Share of answers cut off at the token limit."""
    policies: tuple[str, ...] = ()
    """Who answered: `name@version`, or `provider`."""
    rewards: dict[str, float] = {}
    """Mean of each reward component of its answers; empty for a role without a scorer."""
    reward: float | None = None
    """Mean over episodes of the reward that it is trained on; None for a role that is not trained, or has none."""


class Ending(TaskEnding, frozen=True, kw_only=True):
    """How one episode ended, with the trained reward of each role. `outcome_floored` says that it failed without an
    outcome of its own and counts the lowest of its evaluation."""

    by_role: dict[str, float] = msgspec.field(default_factory=dict)
    outcome_floored: bool = False


class EvaluationSink:
    """Counts calls by role and endings by task, and passes every record on to `sink`."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.played: list[Played] = []
        """The episodes that have ended."""
        self.answered: dict[str, TokenCounts] = {}
        """What answered calls, by the name of the policy, or of the model that the provider was asked for."""
        self._roles: dict[str, _RoleCount] = {}
        self._rewards: dict[str, dict[str, float]] = {}
        self._samples: defaultdict[str, list[Sample]] = defaultdict(list)
        self._timed_out: defaultdict[str, set[str]] = defaultdict(set)
        self._last: dict[str, tuple[float, int, str]] = {}
        self._lock = threading.Lock()

    def write(self, records: Sequence[Record]) -> None:
        """Count and pass on. A chosen candidate's rewards count when they come with its call."""
        with self._lock:
            chosen: dict[str, tuple[_RoleCount, CallRecord, dict[str, float]]] = {}
            for record in records:
                match record:
                    case CallRecord():
                        self._call(record, chosen)
                    case RewardRecord() if record.target in chosen:
                        role, _, own = chosen[record.target]
                        role.rewards[record.name].append(record.value)
                        own[record.name] = record.value
                    case RewardRecord() if "." not in record.target:
                        self._rewards.setdefault(record.target, {})[record.name] = record.value
                    case Episode():
                        self.played.append(self._played(record))
            for _, call, own in chosen.values():
                self._samples[call.episode].append(single_sample(call, own))
        self.sink.write(records)

    def roles(self, rewards: Mapping[str, float] | None = None) -> dict[str, RoleStatistics]:
        """Statistics by role, in alphabetical order; `rewards` are the trained ones."""
        given = rewards or {}
        with self._lock:
            return {name: self._roles[name].statistics(given.get(name)) for name in sorted(self._roles)}

    def _played(self, episode: Episode) -> Played:
        return Played(
            episode=episode,
            outcome=self._rewards.pop(episode.id, {}),
            samples=self._samples.pop(episode.id, ()),
            timed_out=self._timed_out.pop(episode.id, ()),
            last=self._last.pop(episode.id, (0.0, 0, NO_ROLE))[2],
        )

    def _call(self, call: CallRecord, chosen: dict[str, tuple[_RoleCount, CallRecord, dict[str, float]]]) -> None:
        role = self._roles.setdefault(call.role, _RoleCount())
        role.add(call)
        if call.status == "ok":
            self.answered.setdefault(call.policy.name if call.policy else call.model, TokenCounts()).add(call)
        ended = (call.started + call.latency, call.step, call.role)
        self._last[call.episode] = max(ended, self._last.get(call.episode, ended))
        if call.status == "timeout":
            self._timed_out[call.episode].add(call.role)
        if call.status == "ok" and call.chosen is not None:
            chosen[candidate_id(call.id, call.chosen)] = (role, call, {})


@dataclass
class _RoleCount:
    calls: int = 0
    failed: int = 0
    truncated: int = 0
    tokens: TokenCounts = field(default_factory=TokenCounts)
    """Of the calls with an answer."""
    episodes: set[str] = field(default_factory=set)
    policies: set[str] = field(default_factory=set)
    rewards: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, call: CallRecord) -> None:
        self.calls += 1
        self.episodes.add(call.episode)
        if call.status != "ok" or call.chosen is None:
            self.failed += 1
            return
        self.tokens.add(call)
        self.truncated += call.candidates[call.chosen].finish_reason == "length"
        self.policies.add(str(call.policy) if call.policy else "provider")

    def statistics(self, reward: float | None) -> RoleStatistics:
        answered = max(self.tokens.calls, 1)
        return RoleStatistics(
            calls=self.calls,
            failed=self.failed,
            turns=self.calls / len(self.episodes),
            prompt_tokens=self.tokens.prompt_tokens / answered,
            completion_tokens=self.tokens.completion_tokens / answered,
            truncated=self.truncated / answered,
            policies=tuple(sorted(self.policies)),
            rewards={name: sum(values) / len(values) for name, values in sorted(self.rewards.items())},
            reward=reward,
        )


def total_use(answered: Mapping[str, TokenCounts], latencies: Sequence[float], prices: Prices) -> Use:
    """Sums over the token counts by name, and their cost; `latencies` are the seconds of each episode."""
    priced = {name: tokens for name, tokens in answered.items() if name in prices}
    costs = [
        (tokens.prompt_tokens * prices[name][0] + tokens.completion_tokens * prices[name][1]) / MILLION
        for name, tokens in priced.items()
    ]
    totals = {name: sum(getattr(t, name) for t in answered.values()) for name in TokenCounts.__struct_fields__}
    return Use(
        **totals,
        seconds=mean(latencies),
        cost=sum(costs) if costs else None,
        unpriced=sum(tokens.calls for name, tokens in answered.items() if name not in prices),
    )
