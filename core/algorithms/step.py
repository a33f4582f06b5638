"""The samples of a step for a method: their rewards, their groups, and the moving averages of earlier steps."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from cotune.algorithms.attribution import Weighed, over_roles, reward_to_go, weigh_rewards
from cotune.algorithms.recipes import Attribution
from cotune.algorithms.samples import Bools, Codes, Floats, Sample, codes, keys


class AdvantageState(msgspec.Struct, frozen=True):
    """The state of advantages between steps: the moving averages, by group key."""

    ema: Mapping[str, float] = {}


class _Sources(NamedTuple):
    """The rewards that count for a sample: its own, the outcome of its episode, and rewards of later turns."""

    own: bool
    outcome: bool
    later_turns: bool


class Step:
    """All samples of a step, [n], and the groups that are compared.

    `samples` are the candidates that are trained on and the other chosen answers of their episodes, whose rewards can
    count for a candidate. `groups` are arrays of indices of `samples`, empty until rewards are known. `tokens` are the
    numbers of response tokens, [n]. Create a step with `Method.step`.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        attribution: Attribution,
        key: tuple[str, ...],
        state: AdvantageState | None = None,
        part: str = "",
        *,
        to_go: bool = False,
    ) -> None:
        """Hold the samples, without groups.

        `key` is the method's `group_by`, and `to_go` says whether the method sums rewards over turns. If policies of a
        step have different recipes, `part` names the samples that this recipe trains (`Recipes.split`).
        """
        self.samples = samples
        self.groups: Sequence[Codes] = ()
        self.tokens: Floats = np.array([sample.tokens for sample in samples], np.float64)
        # [n] samples without a value that the method needs besides the reward (`require`).
        self.unknown: Bools = np.zeros(len(samples), np.bool_)
        # (role, component) that a sample of the role needs and lacks, although it has other components.
        self.lacking: frozenset[tuple[str, str]] = frozenset()
        self.state = state or AdvantageState()
        self._attribution = attribution
        self._key = key
        self._part = part
        self._to_go = to_go
        self._weighed: dict[_Sources, Weighed] = {}

    # Rewards: one number for each sample, NaN if a component that it needs is missing.

    def rewards(self) -> Floats:
        """The weighted sum of the components that count by the method's `attribution`: the candidate's, the episode's
        outcome's, or both. Returns [n]."""
        how = self._attribution
        return self._weigh(own=how.own, outcome=how.outcome).total()

    def rewards_to_go(self, gamma: float = 1.0) -> Floats:
        """R_t = r_t + gamma R_(t+1) over the turns of a role in an episode; the last turn adds the outcome. [n]"""
        weighed = self._weigh(own=True, outcome=True, later_turns=True)
        returns = reward_to_go(self.samples, weighed.own, weighed.outcome, gamma)
        return np.where(weighed.counts, returns, np.nan)

    def mean_rewards_to_go(self, gamma: float = 1.0) -> Floats:
        """`rewards_to_go` divided by the sum of the discounts. [n]"""
        ones = np.ones(len(self.samples))
        zeros = np.zeros(len(self.samples))
        return self.rewards_to_go(gamma) / reward_to_go(self.samples, ones, zeros, gamma)

    def sum_over_roles(self, rewards: Floats) -> Floats:
        """The sum of the rewards of all roles in a turn of an episode. [n]"""
        return over_roles(self.samples, rewards, self._counts(), mean=False)

    def mean_over_roles(self, rewards: Floats) -> Floats:
        """The mean reward of all roles in a turn of an episode. [n]"""
        return over_roles(self.samples, rewards, self._counts(), mean=True)

    def discounted(self, rewards: Floats, gamma: float, by: Literal["turn", "step"] = "step") -> Floats:
        """Discount rewards by the distance of their call from the end of the episode: r gamma^(T - t), [n].

        Calls near the end weigh more. `t` is the position of the call in its episode (`by="step"`), or among the calls
        of its role in the episode (`by="turn"`); T is the last such position.
        """
        sequences = [(sample.rollout, sample.role if by == "turn" else "") for sample in self.samples]
        positions: list[int] = [getattr(sample, by) for sample in self.samples]
        last_position: dict[tuple[str, str], int] = {}
        for sequence, position in zip(sequences, positions, strict=True):
            last_position[sequence] = max(last_position.get(sequence, 0), position)
        end_positions = np.array([last_position[sequence] for sequence in sequences], np.float64)
        return rewards * gamma ** (end_positions - np.array(positions, np.float64))

    def require(self, values: Floats) -> None:
        """Leave samples out of training as `missing_reward` if their entry in `values`, [n], is NaN."""
        self.unknown = self.unknown | np.isnan(values)

    def outcome_missing(self, *, later_turns: bool) -> Bools:
        """Whether the episode of each sample failed without a complete outcome. [n]"""
        how = self._attribution
        return self._weigh(own=how.own, outcome=how.outcome, later_turns=later_turns).outcome_missing

    def _weigh(self, *, own: bool, outcome: bool, later_turns: bool = False) -> Weighed:
        """Weighted rewards of all samples, computed once for each combination of sources."""
        sources = _Sources(own=own, outcome=outcome, later_turns=later_turns)
        if sources not in self._weighed:
            weighed = weigh_rewards(
                self.samples, self._attribution, self._key, own=own, outcome=outcome, later_turns=later_turns
            )
            self._weighed[sources] = weighed
            self.lacking |= weighed.lacking
        return self._weighed[sources]

    def _counts(self) -> Bools:
        """Whether any component counts for each sample, in `rewards` or, by `Method.to_go`, in `rewards_to_go`. [n]"""
        how = self._attribution
        if self._to_go:
            return self._weigh(own=True, outcome=True, later_turns=True).counts
        return self._weigh(own=how.own, outcome=how.outcome).counts

    # Comparisons.

    def group_by(self, *fields: str) -> list[Codes]:
        """Group the compared samples by `fields` instead of the method's `group_by`. Returns the indices of the samples
        of each group.
        """
        compared = [int(index) for group in self.groups for index in group]
        members: dict[Hashable, list[int]] = {}
        for index, key in zip(compared, keys([self.samples[index] for index in compared], fields), strict=True):
            members.setdefault(key, []).append(index)
        return [np.array(indices, np.int64) for indices in members.values()]

    def by_episode(self, rewards: Floats, group: Codes) -> tuple[Floats, Codes]:
        """The mean reward of each episode in a group, [episodes], and for each sample of the group the index of its
        episode in this array, [samples]."""
        episode_index, _ = codes([self.samples[i].rollout for i in group])
        return np.bincount(episode_index, rewards[group]) / np.bincount(episode_index), episode_index

    def moving_average(self, group: Codes, mean: float, decay: float) -> float:
        """Update the moving average of a group, b <- decay b + (1 - decay) mean, from 0, and return the new b.

        A group has the same average in every step in which it has the same key. Each recipe has its own averages.
        """
        first_sample = self.samples[group[0]]
        (key,) = keys([first_sample], self._key)  # all samples of the group have this key
        assert isinstance(key, tuple)
        key_text = "/".join(map(str, key))
        name = f"{self._part} {key_text}".strip()  # the run's recipe has no part name
        average = decay * self.state.ema.get(name, 0.0) + (1.0 - decay) * mean
        self.state = AdvantageState({**self.state.ema, name: average})
        return average
