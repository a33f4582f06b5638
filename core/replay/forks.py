"""Choose the calls of a recorded episode to fork, and count the calls of their branches."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import msgspec

from cotune.errors import ConfigError
from cotune.records.plans import Plan
from cotune.records.structs import CallRecord

_FORM = re.compile(
    r"(?P<kind>all|decisive)|(?P<kind_with_count>first|every|entropy):(?P<count>[1-9][0-9]*)|role:(?P<role>.+)"
)


class ForkRule(msgspec.Struct, frozen=True):
    """Which calls are forked: `all` calls; the calls whose answers decided most in earlier steps (`decisive`); the
    `first` `count` calls; `every` `count`-th call, from the first on; the `count` calls with the highest mean token
    `entropy`; or all calls of one `role`."""

    kind: Literal["all", "decisive", "first", "every", "entropy", "role"]
    count: int = 0
    role: str = ""


def fork_rule(text: str) -> ForkRule:
    """The rule for a value of the setting `replay.forks`, such as `all` or `first:2`. Raises ConfigError for an invalid
    value."""
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            "replay.forks",
            text,
            "is not one of all, decisive, first:N, every:N, entropy:N, role:NAME",
            "For example: --set replay.forks=first:2",
        )
    if match["kind"]:
        return ForkRule(match["kind"])  # type: ignore[arg-type]
    if match["role"]:
        return ForkRule("role", role=match["role"].strip())
    return ForkRule(match["kind_with_count"], int(match["count"]))  # type: ignore[arg-type]


Place = tuple[str, int]
"""A role and its turn: the same place in all episodes of an application."""


def choose_forks(
    calls: Sequence[CallRecord],
    rule: ForkRule,
    most: int,
    seed: int,
    effects: Mapping[Place, float] = MappingProxyType({}),
) -> list[CallRecord]:
    """Choose at most `most` of an episode's forkable `calls` by a rule. Input and result are in step order.

    - `first` takes the first calls, and `entropy` the calls with the highest entropy.
    - `decisive` takes the calls whose answers had the largest effects on the outcome in earlier steps. `effects` has
      the effect of each turn of each role; a turn that is missing there is taken before all others. If all effects are
      0, the calls are drawn at random.
    - `every`, `role` and `all` allow some calls, and draw at random from these if they are more than `most`.

    Random draws depend on `seed`. The weight of a call is 1 / the number of calls from it to the end, which is the cost
    of finishing its branches.

    The choice depends on the episode's answers: on their entropy, and on the number of calls that followed. So the
    answer of a forked call is not a fair sample for its prompt: only the answers of branches are compared (`collect`).
    """
    match rule.kind:
        case "first":
            return list(calls[: min(rule.count, most)])
        case "entropy":
            return _highest(calls, mean_entropy, min(rule.count, most))
        case "every":
            allowed = list(calls[:: rule.count])
        case "role":
            allowed = [call for call in calls if call.role == rule.role]
        case "decisive":

            def effect_of(call: CallRecord) -> float:
                return effects.get((call.role, call.turn), math.inf)

            with_effect = [call for call in calls if effect_of(call) > 0]
            if with_effect:
                return _highest(with_effect, effect_of, most)
            allowed = list(calls)
        case "all":
            allowed = list(calls)
    if len(allowed) <= most:
        return allowed
    # Weighted sampling without replacement (Efraimidis and Spirakis 2006): the highest random() ** (1 / weight).
    # Here 1 / weight is the number of calls from the call to the end.
    calls_to_end = {call.id: len(calls) - position for position, call in enumerate(calls)}
    rng = random.Random(seed)
    drawn = sorted(allowed, key=lambda call: rng.random() ** calls_to_end[call.id], reverse=True)
    return sorted(drawn[:most], key=lambda call: call.step)


def _highest(calls: Sequence[CallRecord], value_of: Callable[[CallRecord], float], n: int) -> list[CallRecord]:
    """The `n` calls with the highest values, in step order. Of equal values, the earlier calls are taken."""
    ranked = sorted(calls, key=lambda call: (-value_of(call), call.step))
    return sorted(ranked[:n], key=lambda call: call.step)


def none_decides(calls: Sequence[CallRecord], effects: Mapping[Place, float]) -> bool:
    """Whether the places of all `calls` are known and none has an effect, so that `decisive` draws at random."""
    return bool(calls) and all(effects.get((call.role, call.turn), math.inf) == 0 for call in calls)


def mean_entropy(call: CallRecord) -> float:
    """Mean of -log p over the tokens of the chosen answer, in nats; 0 without log-probabilities. Its expectation under
    the policy is the mean token entropy, which records do not have."""
    if call.chosen is None or not (logprobs := call.candidates[call.chosen].logprobs):
        return 0.0
    return -sum(logprobs) / len(logprobs)


def can_repeat_before(calls: Sequence[CallRecord], fork: CallRecord) -> bool:
    """Whether all calls that began before `fork` ended can be answered from the record."""
    return all(
        call.status == "ok" and bool(call.candidates) and not call.redacted
        for call in calls
        if call.id != fork.id and call.started < fork.started + fork.latency
    )


def parallel_blocks(calls: Sequence[CallRecord]) -> list[list[CallRecord]]:
    """The `calls` of an episode, which are in step order, grouped into blocks of calls that ran at the same time."""
    blocks: list[list[CallRecord]] = []
    end = float("-inf")
    for call in calls:
        if call.started < end:
            blocks[-1].append(call)
        else:
            blocks.append([call])
            end = call.started
        end = max(end, call.started + call.latency)
    return blocks


class Budget(msgspec.Struct, frozen=True):
    """Expected calls of an episode's branches, if they are as long as the episode: `sampled` calls are answered by
    policies, `repeated` calls from the record."""

    branches: int = 0
    sampled: int = 0
    repeated: int = 0

    def __add__(self, other: Budget) -> Budget:
        return Budget(self.branches + other.branches, self.sampled + other.sampled, self.repeated + other.repeated)


def budget(calls: Sequence[CallRecord], forks: Collection[CallRecord], plan: Plan, plans: Mapping[str, Plan]) -> Budget:
    """The expected calls of all branches of an episode that has these `calls` and is forked at each of `forks`.

    `plan` has the number of branches of a fork (K), and `plans` has the plans of roles with another number.
    """
    total = Budget()
    for fork in forks:
        branches = plans.get(fork.role, plan).k
        # A branch repeats the recorded calls that began before the forked call ended. It samples the forked call and
        # all others.
        fork_end = fork.started + fork.latency
        other_calls = [call for call in calls if call.id != fork.id]
        repeated = sum(call.started < fork_end for call in other_calls)
        sampled = len(calls) - repeated
        total += Budget(branches, sampled=branches * sampled, repeated=branches * repeated)
    return total
