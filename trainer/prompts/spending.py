"""The calls, tokens and money that a search has spent, by role, and its limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cotune.errors import CotuneError
from cotune.records.prices import Prices, money
from cotune.records.structs import CallRecord


class LimitReached(CotuneError):
    """The next episode could pass a limit of the search."""


@dataclass
class Spent:
    """Calls that a model has answered or refused, their tokens and their money."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    unpriced: int = 0
    """Calls whose model has no price, or that report no tokens."""

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass
class Spending:
    """The calls, tokens and money that a search has spent by role, and its limits."""

    max_calls: int
    max_cost: float | None
    prices: Prices
    by_role: dict[str, Spent] = field(default_factory=dict)
    episodes: int = 0
    """Episodes of the application; requests to the reflection model do not count."""
    calls_of_episodes: int = 0
    """Calls of these episodes, including calls that were answered from a record."""
    running: int = 0
    """Number of episodes that are running. Their calls are not counted yet."""
    reserve: int = 0
    """Number of episodes that the limits keep for the comparison on held-out tasks."""

    def count(self, calls: Sequence[CallRecord], *, reflection: bool = False) -> None:
        """Count the calls of an episode that has ended. Calls that were answered from a record cost nothing."""
        if not reflection:
            self.episodes += 1
            self.calls_of_episodes += len(calls)
        self.add(calls)

    def add(self, calls: Sequence[CallRecord]) -> None:
        """Count calls alone, for example of an episode that did not end. Calls that were answered from a record cost
        nothing."""
        for call in calls:
            if call.replayed is None:
                self._add(call)

    def _add(self, call: CallRecord) -> None:
        """Add a call's tokens and cost to its role. A call without a price or without token counts is counted as
        unpriced."""
        spent = self.by_role.setdefault(call.role, Spent())
        prompt = call.prompt_length
        completion = call.answer_length
        spent.calls += 1
        spent.prompt_tokens += prompt
        spent.completion_tokens += completion
        price = self.prices.get(call.policy.name if call.policy else call.model)
        if price is None or not (prompt or completion):
            spent.unpriced += 1
        else:
            spent.cost += money(price, prompt, completion)

    @property
    def calls(self) -> int:
        return sum(spent.calls for spent in self.by_role.values())

    @property
    def cost(self) -> float:
        return sum(spent.cost for spent in self.by_role.values())

    @property
    def calls_per_episode(self) -> float:
        return self.calls_of_episodes / self.episodes if self.episodes else 1.0

    @property
    def cost_per_episode(self) -> float:
        return self.cost / self.calls * self.calls_per_episode if self.calls else 0.0

    @property
    def limit(self) -> str:
        """The limit that one more episode could exceed, such as "max_calls = 2000"; empty if there is none.

        Episodes that are running and the reserve for the held-out tasks count as if they were spent.
        """
        committed_episodes = self.running + self.reserve + 1
        if self.calls + committed_episodes * self.calls_per_episode > self.max_calls:
            return f"max_calls = {self.max_calls}"
        if self.max_cost is not None and self.cost + committed_episodes * self.cost_per_episode > self.max_cost:
            return f"max_cost = {self.max_cost:g}"
        return ""

    def require_room(self) -> None:
        """Raise LimitReached if one more episode could pass a limit."""
        reached_limit = self.limit
        if reached_limit:
            reserved = f", and {self.reserve} runs are kept for the held-out tasks" if self.reserve else ""
            each = f"a run takes about {self.calls_per_episode:.1f}{reserved}"
            raise LimitReached(
                f"The search has reached {reached_limit}: {self.calls} calls are made, {each}.",
                "Raise it and continue with --resume.",
            )

    @property
    def unpriced(self) -> str:
        """The calls whose cost is not known, in words; empty without any, or without prices."""
        unpriced = {role: spent.unpriced for role, spent in sorted(self.by_role.items()) if spent.unpriced}
        if not unpriced or not self.prices:
            return ""
        calls = ", ".join(f"{count} of {role}" for role, count in unpriced.items())
        return f"counted as no money: calls whose model has no --price, or that reported no tokens ({calls})"

    def to_json(self) -> Mapping[str, Any]:
        return {role: spent.to_json() for role, spent in sorted(self.by_role.items())}
