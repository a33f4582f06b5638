"""A run in a few words: its configuration, how far it came, what it learned from, what went wrong, how it ended."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from datetime import datetime
from typing import Literal

import msgspec

from cotune.algorithms.recipes import USUAL
from cotune.reading.causes import causes, shortened
from cotune.reading.headline import SINGLE
from cotune.reading.run import OpenedRun
from cotune.records.policies import UNTRAINED
from cotune.storage.episode_filters import EVERYTHING
from cotune.tables import plural

MOST_CAUSES = 5
"""Causes of failed episodes that are shown; the others are counted."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """A run on one line."""

    recipe: str
    plan: str
    model: str
    bases: dict[str, str]
    """The base models of policies that have another one than `model`, by policy."""
    workflow: str
    teacher: str
    steps: str
    seconds: float
    judge_cost: float
    created: str
    """When the run was begun; of records by themselves, when their latest episode was."""
    episodes: int
    calls: int


def further_bases(run: OpenedRun) -> dict[str, str]:
    """The base models of policies that have another one than the run's own, by policy."""
    own = run.description.get("model")
    return {one.name: one.model for one in run.config.policy if one.model not in ("", own)}


def facts(run: OpenedRun) -> Facts:
    """A run by its configuration, its metrics and its records."""
    config, lines, about = run.config, run.metrics, run.description
    episodes, calls = run.figures.counts()
    plan: str = (config.plan.kind or "") if run.samples else ""
    if run.samples and not plan and lines and "path" in lines[-1]:
        # none was configured, and only under `tree` is a path chosen among candidates
        plan = "independent" if lines[-1]["path"] == SINGLE else "tree"
    # Records by themselves are told by their latest episode.
    latest = [] if run.is_run else run.figures.episode_ids(EVERYTHING, 1)
    last = run.store.episode(latest[0]) if latest else None
    usual: dict[str, str] = {str(kind): recipe for kind, recipe in USUAL.items()}
    return Facts(
        recipe=config.recipe or usual.get(plan, ""),
        plan=plan,
        model=str(about.get("model") or about.get("config", {}).get("model") or ""),
        bases=further_bases(run),
        workflow=str(about.get("workflow") or (last.workflow if last else "")),
        teacher=", ".join(dict.fromkeys(filter(None, [config.distill.teacher, *(p.teacher for p in config.policy)]))),
        steps=f"{len(lines)} of {run.planned}" if run.planned else str(len(lines) or ""),
        seconds=sum(sum(line["seconds"].values()) for line in lines),
        judge_cost=sum(line["counters"].get("judge.cost", 0.0) for line in lines),
        created=_local(str(about.get("created") or "")) or _day(last.started if last else 0.0),
        episodes=episodes,
        calls=calls,
    )


def _local(written: str) -> str:
    """A time of run.json, which has the zone of the machine that made the run, in the zone of this one."""
    try:
        return f"{datetime.fromisoformat(written).astimezone():%Y-%m-%d %H:%M}"
    except (ValueError, OverflowError, OSError):
        return written.replace("T", " ")[:16]


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds)) if seconds else ""


class Learned(msgspec.Struct, frozen=True, kw_only=True):
    """The recorded answers of `path` that a run learned from, which samples none itself. `answers` and their mean
    `tokens` are by role, over all steps; `left_out` counts answers by reason."""

    path: str
    answers: dict[str, int]
    tokens: dict[str, float]
    left_out: dict[str, int]


def learned(run: OpenedRun) -> Learned | None:
    """None for a run that samples its answers itself."""
    if run.samples:
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
        path=run.config.records.path,
        answers={role: int(count) for role, count in sorted(answers.items()) if math.isfinite(count)},
        tokens={role: tokens[role] / count if count else 0.0 for role, count in answers.items()},
        left_out=dict(left_out.most_common()),
    )


class Trouble(msgspec.Struct, frozen=True):
    """Something that went wrong, and how often; 0 for a remark. `kind` says where it is from, `query` leads to its
    episodes, and `more` is the rest of an error."""

    kind: Literal["episodes", "records", "cut", "calls", "untrained", "precision", "last step"]
    text: str
    count: int = 0
    query: dict[str, str] = {}
    more: str = ""


def troubles(run: OpenedRun, most: int = MOST_CAUSES, *, of_calls: bool = True) -> list[Trouble]:
    """All that went wrong: causes of failed episodes, the `most` common ones first, lost records, and the remarks of
    the last step. With `of_calls`, which takes seconds in a long run, also failed calls and roles without a
    policy."""
    store, last = run.store, next(iter(run.metrics[-1:]), {})
    shown, others = shortened(causes(store.figures().failed_episodes()), most)
    found = [
        Trouble(
            "episodes",
            f"{plural(cause.count, 'episode')} {cause.text}",
            cause.count,
            {"status": "error", "phase": cause.phase},
            cause.rest,
        )
        for cause in shown
    ]
    found += [Trouble("episodes", others, 1, {"status": "error"})] if others else []
    counters = store.counters()
    wrongs = (("lost", "records were lost"), ("refused", "late rewards were refused"))
    for name, text in (*wrongs, ("dropped", "records were dropped by applications before they reached the store")):
        found += [Trouble("records", f"{n:,} {text}", n)] if (n := counters[name]) else []
    if cut := store.figures().cut_feedback():
        ends = "was too long, and its middle is cut" if cut == 1 else "were too long, and their middles are cut"
        found.append(Trouble("cut", f"{plural(cut, 'text')} beside rewards {ends}"))
    if (precision := run.about.precision) and precision.fell_back:
        text = f"in float32, as in bfloat16 {precision.noise}"
        if not precision.noise:
            text = f"in float32, as sampler and learner differed in bfloat16 by {precision.gap:.2g} nats a token"
        found.append(Trouble("precision", text, 1))
    for role, status, n in store.figures().failed_calls() if of_calls else ():
        found.append(Trouble("calls", f"{plural(n, 'call')} of {role}: {status}", n))
    for role, n in store.figures().answered_by(UNTRAINED.name) if of_calls else ():
        answered = f"{UNTRAINED}, the untrained model, answered {plural(n, 'call')}"
        found.append(Trouble("untrained", f"role {role} has no policy: {answered}", 0, {"role": role}))
    notes = [*(last.get("notes") or ())]
    notes += [f"policy {name} was not updated, {why}" for name, why in last.get("stayed", {}).items()]
    return found + [Trouble("last step", f"last step: {note}") for note in notes]


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
        made = len(run.metrics)
        text = f"{'The end of the run' if made == run.planned else f'Step {made + 1}'} failed: {end.cause}"
    else:
        text = f"It ended early: {end.cause}" if end.kind == "ended" else end.cause
    remedy = end.remedy if end else ""
    continues = state != "finished" and command not in remedy
    return Ending(text=text, remedy=remedy, command=command if continues else "")
