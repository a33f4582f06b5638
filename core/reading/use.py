"""The use of a run by role: calls, tokens, seconds, cost."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

import msgspec

from cotune.reading.run import OpenedRun
from cotune.records.prices import Prices, money


class Use(msgspec.Struct, kw_only=True):
    """The sums over the calls of a role. `cost` is None if one of its models has no price."""

    calls: int = 0
    failed: int = 0
    turns: int = 0
    prompt: int = 0
    completion: int = 0
    seconds: float = 0.0
    candidates: int = 0
    models: Counter[str] = msgspec.field(default_factory=Counter)
    cost: float | None = None


class Totals:
    """Sums by role and model. Calls never change, so each is read only once."""

    def __init__(self, run: OpenedRun) -> None:
        self._run = run
        self._until = 0
        self._sums: dict[tuple[str, str], Use] = {}
        self._lock = threading.Lock()

    def by_role(self, prices: Prices | None = None) -> dict[str, Use]:
        """The calls, tokens, seconds and cost of each role, in the order of the roles' first calls.

        The price of a model comes from `prices`, or else from the run's configuration. A role that uses a model without
        a price has the cost None.
        """
        with self._lock:
            self._read_new_calls()
            sums = {key: msgspec.structs.replace(use) for key, use in self._sums.items()}
        all_prices = {**self._run.config.prices, **(prices or {})}
        uses: dict[str, Use] = {}
        for (role, model), use_of_model in sums.items():
            use = uses.setdefault(role, Use(cost=0.0))
            _add(use, use_of_model)
            use.models[model] += use_of_model.calls
            if model not in all_prices:
                use.cost = None
            elif use.cost is not None:
                use.cost += money(all_prices[model], use_of_model.prompt, use_of_model.completion)
        return uses

    def _read_new_calls(self) -> None:
        """Add the calls that were recorded since the last read to the sums by role and model."""
        # `_until` is the position in the records up to which they were read.
        self._until, rows = self._run.figures.use(self._until)
        for row in rows:
            part = Use(
                calls=row.calls,
                failed=row.failed,
                turns=row.turns,
                prompt=row.prompt_tokens,
                completion=row.answer_tokens,
                seconds=row.seconds,
                candidates=row.candidates,
            )
            _add(self._sums.setdefault((str(row.role), str(row.model)), Use()), part)


_SUMMED = ("calls", "failed", "turns", "prompt", "completion", "seconds", "candidates")


def _add(use: Use, part: Use) -> None:
    """Add the sums of `part` to `use`. `turns` is the largest number of turns, so it is not added up."""
    for name in _SUMMED:
        before = getattr(use, name)
        added = getattr(part, name)
        setattr(use, name, max(before, added) if name == "turns" else before + added)


def total_cost(uses: Mapping[str, Use]) -> float | None:
    """The cost of all roles with a cost; None if no role has one."""
    costs = [use.cost for use in uses.values() if use.cost is not None]
    return sum(costs) if costs else None
