"""What episodes take: calls, tokens, time and, where prices are given, money."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from cotune.recording.records import Call
from cotune.trainer.evaluation.modes import Prices
from cotune.trainer.evaluation.statistics import Interval, mean

MILLION = 1_000_000


class TokenCounts(msgspec.Struct, kw_only=True):
    """Calls and tokens of one policy, or of one model of the application's own provider."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    uncounted: int = 0
    """Calls whose provider reported no tokens."""

    def add(self, call: Call) -> None:
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
