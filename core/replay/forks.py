"""Which calls of a recorded episode are forked, and how many calls that takes."""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import msgspec

from cotune.errors import ConfigError
from cotune.records.plans import Plan
from cotune.records.structs import CallRecord

_FORM = re.compile(r"(all)|(first|every|entropy):([1-9][0-9]*)|(role):(.+)")


class ForkRule(msgspec.Struct, frozen=True):
    """`all` calls; the `first` `count` calls; `every` `count`-th call, from the first on; the `count` calls of highest
    mean token `entropy`; or all calls of one `role`."""

    kind: Literal["all", "first", "every", "entropy", "role"]
    count: int = 0
    role: str = ""


def fork_rule(text: str) -> ForkRule:
    """The rule that `replay.forks` names. Raises ConfigError for anything else."""
    found = _FORM.fullmatch(text.strip())
    if found is None:
        raise ConfigError(
            "replay.forks",
            text,
            "is not one of all, first:N, every:N, entropy:N, role:NAME",
            "For example: --set replay.forks=first:2",
        )
    if found[1]:
        return ForkRule("all")
    if found[4]:
        return ForkRule("role", role=found[5].strip())
    return ForkRule(found[2], int(found[3]))  # type: ignore[arg-type]


def choose_forks(calls: Sequence[CallRecord], rule: ForkRule, most: int, seed: int) -> list[CallRecord]:
    """At most `most` of the forkable `calls` (in step order) of an episode, in step order.

    If the rule takes more, `first` and `entropy` take the first in their order. The other rules draw at random, fixed
    by `seed`, with weight 1 / the number of calls from a call to the end: the cost of finishing its branches.

    The choice depends on the episode's own answers: by their entropy, and by how many calls followed. So the answer of
    a forked call is no fair sample of its prompt, and only the answers of the branches are compared (`collect`).
    """
    match rule.kind:
        case "first":
            return list(calls[: min(rule.count, most)])
        case "entropy":
            ranked = sorted(calls, key=lambda call: (-mean_entropy(call), call.step))[: min(rule.count, most)]
            return sorted(ranked, key=lambda call: call.step)
        case "every":
            found = list(calls[:: rule.count])
        case "role":
            found = [call for call in calls if call.role == rule.role]
        case "all":
            found = list(calls)
    if len(found) <= most:
        return found
    left = {call.id: len(calls) - place for place, call in enumerate(calls)}
    chance = random.Random(seed)
    drawn = sorted(found, key=lambda call: chance.random() ** left[call.id], reverse=True)  # Efraimidis, Spirakis 2006
    return sorted(drawn[:most], key=lambda call: call.step)


def mean_entropy(call: CallRecord) -> float:
    """Mean of -log p over the tokens of the answer that went on, in nats: what a record has of the mean token entropy,
    whose expectation under the policy it shares. 0 where log-probabilities are not known."""
    if call.chosen is None or not (logprobs := call.candidates[call.chosen].logprobs):
        return 0.0
    return -sum(logprobs) / len(logprobs)


def repeatable(calls: Sequence[CallRecord], fork: CallRecord) -> bool:
    """Whether all calls that began before `fork` ended can be answered from the record."""
    return all(
        call.status == "ok" and bool(call.candidates) and not call.redacted
        for call in calls
        if call.id != fork.id and call.started < fork.started + fork.latency
    )


class Budget(msgspec.Struct, frozen=True):
    """Calls of the branches of an episode, if they are as long as it was: answered by policies, and repeated."""

    branches: int = 0
    sampled: int = 0
    repeated: int = 0

    def __add__(self, other: Budget) -> Budget:
        return Budget(self.branches + other.branches, self.sampled + other.sampled, self.repeated + other.repeated)


def budget(calls: Sequence[CallRecord], forks: Collection[CallRecord], plan: Plan, plans: Mapping[str, Plan]) -> Budget:
    """Calls that K branches at each of `forks` take, in an episode of these calls. `plans` has the plan of each role
    that has another K."""
    total = Budget()
    for fork in forks:
        branches = plans.get(fork.role, plan).k
        repeated = sum(c.id != fork.id and c.started < fork.started + fork.latency for c in calls)
        total += Budget(branches, branches * (len(calls) - repeated), branches * repeated)
    return total
