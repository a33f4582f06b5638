"""What a run took and what it is: tokens, cost, what failed, and how it was configured."""

from __future__ import annotations

import math
import threading
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import msgspec

from cotune.algorithms.from_records import FROM_RECORDS
from cotune.algorithms.recipes import USUAL
from cotune.integrations.web.viewer.opened import OpenedRun
from cotune.reading.causes import causes, shortened
from cotune.storage.run_layout import Rollback
from cotune.tables import plural

MOST_CAUSES = 5
"""Causes of failed episodes that a page shows; the others are counted."""
Prices = Mapping[str, tuple[float, float]]
"""Money per million tokens of prompts and completions, by model."""


class Use(msgspec.Struct, kw_only=True):
    """What the calls of a role took. `cost` is None where no price is known of a model of its."""

    calls: int = 0
    failed: int = 0
    prompt: int = 0
    completion: int = 0
    models: Counter[str] = msgspec.field(default_factory=Counter)
    cost: float | None = None


def prices_of(run: OpenedRun, given: Prices) -> Prices:
    """Those of the run's configuration, and `given` ones, which go before."""
    return {**(run.config.get("prices") or {}), **given}


def total_cost(uses: Mapping[str, Use]) -> float | None:
    """Of all roles that have one; None where none has."""
    costs = [use.cost for use in uses.values() if use.cost is not None]
    return sum(costs) if costs else None


class Totals:
    """Tokens by role and model, summed once: a call is never changed, so only new ones are read."""

    def __init__(self, run: OpenedRun) -> None:
        self._run = run
        self._until = 0
        self._sums: dict[tuple[str, str], list[int]] = {}
        self._lock = threading.Lock()

    def by_role(self, prices: Prices) -> dict[str, Use]:
        """What each role used; with its cost where each of its models has a price."""
        with self._lock:
            self._read()
            sums = {key: list(values) for key, values in self._sums.items()}
        found: dict[str, Use] = {}
        for (role, model), (calls, failed, prompt, completion) in sums.items():
            use = found.setdefault(role, Use())
            use.calls, use.failed = use.calls + calls, use.failed + failed
            use.prompt, use.completion = use.prompt + prompt, use.completion + completion
            use.models[model] += calls
        for role, use in found.items():
            if use.models.keys() <= prices.keys():
                use.cost = sum(
                    (prices[model][0] * s[2] + prices[model][1] * s[3]) / 1e6
                    for (of, model), s in sums.items()
                    if of == role
                )
        return dict(sorted(found.items()))

    def _read(self) -> None:
        newest = self._run.rows("SELECT coalesce(max(rowid), 0) FROM calls")
        until = newest[0][0] if newest else 0
        if until <= self._until:
            return
        sql = """SELECT role, CASE WHEN json_valid(body) THEN coalesce(json_extract(body, '$.model'), '') ELSE '' END,
                 count(*), sum(status != 'ok'), sum(prompt_tokens), sum(completion_tokens)
                 FROM calls WHERE rowid > ? AND rowid <= ? GROUP BY 1, 2"""
        for role, model, *values in self._run.rows(sql, (self._until, until)):
            sums = self._sums.setdefault((str(role), str(model)), [0, 0, 0, 0])
            for place, value in enumerate(values):
                sums[place] += value or 0
        self._until = until


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """A run on one line."""

    recipe: str
    plan: str
    model: str
    workflow: str
    teacher: str
    steps: str
    seconds: float
    judge_cost: float
    created: str
    episodes: int
    abandoned: int
    """Episodes of steps that a rollback has taken back."""
    calls: int


class Learned(msgspec.Struct, frozen=True, kw_only=True):
    """What a run learned from that samples nothing: the recorded answers of `path`. `answers` and their mean `tokens`
    are by role, over all steps; `left_out` counts answers by reason."""

    path: str
    answers: dict[str, int]
    tokens: dict[str, float]
    left_out: dict[str, int]


def learned(run: OpenedRun) -> Learned | None:
    """None for a run that samples its answers itself."""
    if run.config.get("recipe") not in FROM_RECORDS:
        return None
    answers: defaultdict[str, float] = defaultdict(float)
    tokens: defaultdict[str, float] = defaultdict(float)
    left_out: Counter[str] = Counter()
    for line in run.metrics:
        left_out.update(line["left_out"])
        for role, figures in line["roles"].items():
            answers[role] += figures.get("rows", 0)
            tokens[role] += figures.get("rows", 0) * figures.get("tokens_mean", 0.0)
    return Learned(
        path=run.config.get("records", {}).get("path", ""),
        answers={role: int(count) for role, count in sorted(answers.items()) if math.isfinite(count)},
        tokens={role: tokens[role] / count if count else 0.0 for role, count in answers.items()},
        left_out=dict(left_out.most_common()),
    )


def facts(run: OpenedRun) -> Facts:
    """What a run is, from its configuration and its metrics."""
    config, lines = run.config, run.metrics
    abandoned = "(SELECT count(*) FROM episodes WHERE status = 'abandoned')"
    counts = run.rows(f"SELECT (SELECT count(*) FROM episodes), {abandoned}, (SELECT count(*) FROM calls)")
    episodes, abandoned, calls = counts[0] if counts else (0, 0, 0)
    recorded = config.get("recipe") in FROM_RECORDS
    kind = "" if recorded else (config.get("plan") or {}).get("kind") or _plan_of(lines)
    usual = {str(plan): recipe for plan, recipe in USUAL.items()}
    total = config.get("steps")
    return Facts(
        recipe=str(config.get("recipe") or usual.get(kind, "")),
        plan=str(kind),
        model=str(run.description.get("model") or config.get("model") or ""),
        workflow=str(run.description.get("workflow") or ""),
        teacher=str((config.get("distill") or {}).get("teacher") or ""),
        steps=f"{len(lines)} of {total}" if total else str(len(lines) or ""),
        seconds=sum(sum(line["seconds"].values()) for line in lines),
        judge_cost=sum(line["counters"].get("judge.cost", 0.0) for line in lines),
        created=str(run.description.get("created") or ""),
        episodes=episodes,
        abandoned=abandoned,
        calls=calls,
    )


def _plan_of(lines: list[dict[str, Any]]) -> str:
    """The plan where none was configured: only under `tree` was a path chosen among candidates."""
    if not lines or "path" not in lines[-1]:
        return ""
    return "independent" if lines[-1]["path"] == "single samples" else "tree"


class Trouble(msgspec.Struct, frozen=True):
    """Something that went wrong, how often, and where the page of it is; `count` 0 for what the last step noted. `more`
    is what else an error says."""

    text: str
    count: int
    query: dict[str, str] = {}
    more: str = ""


def troubles(run: OpenedRun) -> list[Trouble]:
    """Causes of failed episodes, the commonest first, records that are lost, and what the last step noted."""
    shown, others = shortened(causes(run.store.failed_episodes() if run.store else ()), MOST_CAUSES)
    found = [
        Trouble(
            f"{plural(cause.count, 'episode')} {cause.text}",
            cause.count,
            {"status": "error", "phase": cause.phase},
            cause.rest,
        )
        for cause in shown
    ]
    if others:
        found.append(Trouble(others, 1, {"status": "error"}))
    if run.store:
        counters = run.store.counters()
        texts = {"lost": "records were lost", "refused": "late rewards were refused"}
        found += [Trouble(f"{n:,} {text}", n) for name, text in texts.items() if (n := counters[name])]
    found += [Trouble(text, 0, {"status": "abandoned"}) for text in rolled_back(run)]
    for line in run.metrics[-1:]:
        found += [Trouble(f"last step: {note}", 0) for note in line.get("notes") or ()]
        stayed = line.get("stayed", {}).items()
        found += [Trouble(f"last step: policy {name} was not updated, {why}", 0) for name, why in stayed]
    return found


def rolled_back(run: OpenedRun) -> list[str]:
    """Which steps rollbacks took back, and why, the oldest first."""
    try:
        return [back.text for back in msgspec.convert(run.description.get("rollbacks") or (), tuple[Rollback, ...])]
    except msgspec.ValidationError as error:
        return [f"the rollbacks in run.json cannot be read: {error}"]


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended badly or early: in a sentence, what to do about it, and the command that continues it."""

    text: str
    remedy: str
    command: str


def ending(run: OpenedRun) -> Ending | None:
    """None for a run that is under way or ended well, and for records."""
    end, state = run.end, run.state
    if state not in ("failed", "stopped") and not (state == "finished" and end and end.kind == "ended"):
        return None
    command = f"cotune train --resume {run.path}"
    if end is None:
        text = "The process of this run has ended and left no reason: it was killed, or its machine went down."
    elif end.kind == "failed":
        steps, made = run.config.get("steps"), len(run.metrics)
        text = f"{'The end of the run' if made == steps else f'Step {made + 1}'} failed: {end.cause}"
    else:
        text = f"It ended early: {end.cause}" if end.kind == "ended" else end.cause
    remedy = end.remedy if end else ""
    goes_on = state != "finished" and command not in remedy
    return Ending(text=text, remedy=remedy, command=command if goes_on else "")
