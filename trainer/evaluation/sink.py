"""The records that an evaluation is computed from: episodes, rewards, and calls without their texts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from cotune.algorithms.goal import NO_ROLE, Played, single_sample
from cotune.algorithms.samples import Sample
from cotune.reading.evaluations import ModeUse, RoleStatistics
from cotune.recording.recorder import Sink
from cotune.records.ids import candidate_id
from cotune.records.prices import Prices, money
from cotune.records.structs import CallRecord, Episode, Record, RewardRecord
from cotune.trainer.evaluation.statistics import mean


class EvaluatedCall(NamedTuple):
    """The facts of one call that an evaluation needs. Its tokens were counted by the engine, or reported by the
    provider."""

    episode: str
    role: str
    status: str
    end: tuple[float, int]
    """Time of its end, and its step: the last call of an episode has the largest."""
    answered_by: str
    """`name@version` of a policy, or `provider`."""
    priced_as: str
    """The name of the policy, or of the model that the provider was asked for."""
    prompt_tokens: int
    completion_tokens: int
    sample: Sample | None
    """The chosen answer, with its rewards; None without one."""


class EvaluationSink:
    """Keeps the records that an evaluation is computed from, and passes every record on to `sink`."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.episodes: list[Episode] = []
        """The episodes that have ended."""
        self.calls: list[EvaluatedCall] = []
        self._rewards: dict[str, dict[str, float]] = {}

    def write(self, records: Sequence[Record]) -> None:
        """Take the records into the evaluation, and pass them on."""
        for record in records:
            match record:
                case CallRecord():
                    self.calls.append(self._evaluated_call(record))
                case RewardRecord():
                    self._rewards_of(record.target)[record.name] = record.value
                case Episode():
                    self.episodes.append(record)
        self.sink.write(records)

    def played(self) -> list[Played]:
        """Return the episodes that have ended, with their calls."""
        calls_of_episode: defaultdict[str, list[EvaluatedCall]] = defaultdict(list)
        for call in self.calls:
            calls_of_episode[call.episode].append(call)

        played: list[Played] = []
        for episode in self.episodes:
            calls = calls_of_episode[episode.id]
            last = NO_ROLE
            if calls:
                last = max(calls, key=lambda call: (call.end, call.role)).role
            played.append(
                Played(
                    episode=episode,
                    outcome=self._rewards_of(episode.id),
                    samples=[call.sample for call in calls if call.sample is not None],
                    timed_out={call.role for call in calls if call.status == "timeout"},
                    last=last,
                )
            )
        return played

    def _rewards_of(self, target: str) -> dict[str, float]:
        """Return the rewards of a candidate or an episode. Rewards that arrive later are added to the same object."""
        return self._rewards.setdefault(target, {})

    def _evaluated_call(self, call: CallRecord) -> EvaluatedCall:
        """The facts of a call that an evaluation needs. Rewards that arrive later are added to its sample, which shares
        their dictionary."""
        sample = None
        # A call that failed or was not answered has nothing to score.
        if call.status == "ok" and call.chosen is not None:
            sample = single_sample(call, self._rewards_of(candidate_id(call.id, call.chosen)))
        return EvaluatedCall(
            episode=call.episode,
            role=call.role,
            status=call.status,
            end=(call.started + call.latency, call.step),
            answered_by=str(call.policy) if call.policy else "provider",
            priced_as=call.policy.name if call.policy else call.model,
            prompt_tokens=call.prompt_length,
            completion_tokens=call.answer_length,
            sample=sample,
        )


def role_statistics(calls: Sequence[EvaluatedCall], reward: float | None) -> RoleStatistics:
    """Return the statistics of the calls of one role, with the trained `reward`."""
    # A call has a sample if it was answered. The means are over these calls.
    answered = [call for call in calls if call.sample is not None]
    samples = [call.sample for call in calls if call.sample is not None]
    components: defaultdict[str, list[float]] = defaultdict(list)
    for sample in samples:
        for name, value in sample.rewards.items():
            components[name].append(value)
    n = max(len(answered), 1)
    return RoleStatistics(
        calls=len(calls),
        failed=len(calls) - len(answered),
        turns=len(calls) / len({call.episode for call in calls}),
        prompt_tokens=sum(call.prompt_tokens for call in answered) / n,
        completion_tokens=sum(call.completion_tokens for call in answered) / n,
        truncated=sum(sample.truncated for sample in samples) / n,
        policies=tuple(sorted({call.answered_by for call in answered})),
        rewards={name: fmean(values) for name, values in sorted(components.items())},
        reward=reward,
    )


def total_use(calls: Sequence[EvaluatedCall], latencies: Sequence[float], prices: Prices) -> ModeUse:
    """Add up the calls with an answer and their cost. `latencies` are the seconds of each episode."""
    answered = [call for call in calls if call.status == "ok"]
    costs: list[float] = []
    for call in answered:
        if call.priced_as in prices:
            costs.append(money(prices[call.priced_as], call.prompt_tokens, call.completion_tokens))
    return ModeUse(
        calls=len(answered),
        prompt_tokens=sum(call.prompt_tokens for call in answered),
        completion_tokens=sum(call.completion_tokens for call in answered),
        uncounted=sum(not call.prompt_tokens and not call.completion_tokens for call in answered),
        seconds=mean(latencies, least=0.0),
        cost=sum(costs) if costs else None,
        unpriced=len(answered) - len(costs),
    )
