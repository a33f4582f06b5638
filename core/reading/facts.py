"""A run in a few words: its configuration, its progress, the answers it learned from, its problems and its end."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

import msgspec

from cotune.algorithms.recipes import USUAL
from cotune.reading.causes import causes, shorten_causes
from cotune.reading.gradient_shares import dominant_roles, shares_of
from cotune.reading.headline import SINGLE
from cotune.reading.run import OpenedRun
from cotune.records.plans import PlanKind
from cotune.records.policies import UNTRAINED
from cotune.storage.episode_filters import EVERYTHING
from cotune.tables import plural

MOST_CAUSES = 5
"""Maximum number of causes of failed episodes that are shown. The others are counted."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """A run on one line."""

    recipe: str
    plan: str
    model: str
    bases: dict[str, str]
    """The base models of policies that do not use `model`, by policy."""
    workflow: str
    teacher: str
    steps: str
    seconds: float
    judge_cost: float
    created: str
    """The time when the run was started. For records without a run, the time of their latest episode."""
    episodes: int
    calls: int


def further_bases(run: OpenedRun) -> dict[str, str]:
    """The base models of policies that do not use the model of the run, by policy."""
    run_model = run.description.get("model")
    return {policy.name: policy.model for policy in run.config.policy if policy.model not in ("", run_model)}


def facts(run: OpenedRun) -> Facts:
    """The facts that describe a run in lists and on its page: recipe, plan, models, workflow, steps, time and costs.

    They come from its configuration, its metrics and its records. Records without a run are described by their latest
    episode.
    """
    config = run.config
    lines = run.metrics
    description = run.description

    # 1. Its plan, and its recipe: the default recipe of the plan if none was configured.
    plan: PlanKind | None = None
    if run.samples:
        plan = config.plan.kind or _plan_of_metrics(lines)
    recipe = config.recipe or ""
    if not recipe and plan is not None:
        recipe = USUAL[plan]

    # 2. Its workflow, and when it was created: by run.json, or by the latest episode of records without a run.
    workflow = str(description.get("workflow") or "")
    created = _local_time(str(description.get("created") or ""))
    latest_ids = [] if run.is_run else run.figures.episode_ids(EVERYTHING, limit=1)
    if latest_ids:
        latest = run.store.episode(latest_ids[0])
        workflow = latest.workflow
        created = ""
        if latest.started:
            created = time.strftime("%Y-%m-%d %H:%M", time.localtime(latest.started))

    # 3. Its models and its numbers.
    configured_model = description.get("config", {}).get("model")
    teachers: dict[str, None] = {}  # in order, each once
    for teacher in [config.distill.teacher, *(policy.teacher for policy in config.policy)]:
        if teacher:
            teachers[teacher] = None
    steps = str(len(lines) or "")
    if run.planned:
        steps = f"{len(lines)} of {run.planned}"
    episodes, calls = run.figures.counts()
    return Facts(
        recipe=recipe,
        plan=plan or "",
        model=str(description.get("model") or configured_model or ""),
        bases=further_bases(run),
        workflow=workflow,
        teacher=", ".join(teachers),
        steps=steps,
        seconds=sum(sum(line["seconds"].values()) for line in lines),
        judge_cost=sum(line["counters"].get("judge.cost", 0.0) for line in lines),
        created=created,
        episodes=episodes,
        calls=calls,
    )


def _plan_of_metrics(lines: Sequence[Mapping[str, Any]]) -> PlanKind | None:
    """The plan of a run that configured none, by the `path` of its episodes in metrics.jsonl; None if unknown.

    Only under a tree plan are episodes paths that were chosen among candidates.
    """
    if not lines or "path" not in lines[-1]:
        return None
    return "independent" if lines[-1]["path"] == SINGLE else "tree"


def _local_time(written: str) -> str:
    """A time of run.json in the time zone of this machine. It is written in the zone of the machine that trained."""
    try:
        return f"{datetime.fromisoformat(written).astimezone():%Y-%m-%d %H:%M}"
    except (ValueError, OverflowError, OSError):
        return written.replace("T", " ")[:16]


class Learned(msgspec.Struct, frozen=True, kw_only=True):
    """The recorded answers in `path` that a run learned from, instead of sampling answers itself. `answers` and their
    mean `tokens` are by role, over all steps. `left_out` counts answers that were not used, by reason."""

    path: str
    answers: dict[str, int]
    tokens: dict[str, float]
    left_out: dict[str, int]


def learned_answers(run: OpenedRun) -> Learned | None:
    """The recorded answers that a run learned from; None for a run that samples its answers itself."""
    if run.samples:
        return None
    answers: defaultdict[str, float] = defaultdict(float)
    total_tokens: defaultdict[str, float] = defaultdict(float)
    left_out: Counter[str] = Counter()
    for line in run.metrics:
        left_out.update(line["left_out"])
        for role, figures in line["roles"].items():
            rows = figures.get("rows", 0)
            answers[role] += rows
            total_tokens[role] += rows * figures.get("tokens_mean", 0.0)
    return Learned(
        path=run.config.records.path,
        answers={role: int(count) for role, count in sorted(answers.items()) if math.isfinite(count)},
        tokens={role: total_tokens[role] / count if count else 0.0 for role, count in answers.items()},
        left_out=dict(left_out.most_common()),
    )


class Trouble(msgspec.Struct, frozen=True):
    """A problem of a run, and how often it occurred; 0 for a remark. `kind` is its source, `query` chooses its
    episodes, and `more` is the rest of an error after its first line."""

    kind: Literal["episodes", "records", "cut", "calls", "untrained", "precision", "gradient", "last step"]
    text: str
    count: int = 0
    query: dict[str, str] = {}
    more: str = ""


def find_troubles(run: OpenedRun, most: int = MOST_CAUSES, *, of_calls: bool = True) -> list[Trouble]:
    """The problems of a run, for people who ask why it does not learn.

    They are the `most` common causes of failed episodes, lost records, problems of the update, and the remarks of the
    last step. With `of_calls`, which takes seconds in a long run, also failed calls and roles without a policy.
    """
    problems = [*_failed_episodes(run, most), *_lost_records(run), *_update_problems(run)]
    if of_calls:
        problems += _call_problems(run)
    last_step = run.metrics[-1] if run.metrics else {}
    notes = [*(last_step.get("notes") or ())]
    notes += [f"policy {name} was not updated, {reason}" for name, reason in last_step.get("stayed", {}).items()]
    return problems + [Trouble("last step", f"last step: {note}") for note in notes]


def _failed_episodes(run: OpenedRun, most: int) -> Iterator[Trouble]:
    """The `most` common causes of failed episodes, and the number of other failed episodes."""
    shown, others = shorten_causes(causes(run.store.figures().failed_episodes()), most)
    for cause in shown:
        text = f"{plural(cause.count, 'episode')} {cause.text}"
        query = {"status": "error", "phase": cause.phase}
        yield Trouble("episodes", text, cause.count, query, cause.rest)
    if others:
        yield Trouble("episodes", others, 1, {"status": "error"})


def _lost_records(run: OpenedRun) -> Iterator[Trouble]:
    """Records that were lost, refused or cut."""
    counters = run.store.counters()
    texts = {
        "lost": "records were lost",
        "refused": "late rewards were refused",
        "dropped": "records were dropped by applications before they reached the store",
    }
    for counter, text in texts.items():
        if counters[counter]:
            yield Trouble("records", f"{counters[counter]:,} {text}", counters[counter])
    if cut := run.store.figures().cut_feedback():
        ends = "was too long, and its middle is cut" if cut == 1 else "were too long, and their middles are cut"
        yield Trouble("cut", f"{plural(cut, 'feedback text')} {ends}")


def _update_problems(run: OpenedRun) -> Iterator[Trouble]:
    """Training in a higher precision than planned, and roles that take most of a shared policy's gradient."""
    if (precision := run.about.precision) and precision.fell_back:
        text = f"in float32, because in bfloat16 {precision.noise}"
        if not precision.noise:
            text = f"in float32, as sampler and learner differed in bfloat16 by {precision.gap:.2g} nats a token"
        yield Trouble("precision", text, 1)
    for role, share in dominant_roles([shares_of(line["roles"]) for line in run.metrics]).items():
        text = f"role {role} had {share:.0%} of the gradient of a policy that it shares, in the mean of the steps"
        yield Trouble("gradient", text)


def _call_problems(run: OpenedRun) -> Iterator[Trouble]:
    """Failed calls by role, and roles without a policy."""
    for role, status, count in run.store.figures().failed_calls():
        yield Trouble("calls", f"{plural(count, 'call')} of {role}: {status}", count)
    for role, count in run.store.figures().answered_by(UNTRAINED.name):
        answered = f"{UNTRAINED}, the untrained model, answered {plural(count, 'call')}"
        yield Trouble("untrained", f"role {role} has no policy: {answered}", 0, {"role": role})


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a run that failed or ended early: a sentence, the remedy, and the command that continues the run."""

    text: str
    remedy: str
    command: str


def ending(run: OpenedRun) -> Ending | None:
    """The end of a run that failed or ended early. None for a run that is under way or finished, and for records."""
    end = run.end
    state = run.state
    ended_early = state == "finished" and end is not None and end.kind == "ended"
    if state not in ("failed", "stopped") and not ended_early:
        return None
    remedy = end.remedy if end else ""
    if end is None:
        text = "The process of this run has ended and left no reason: it was killed, or its machine went down."
    elif end.kind == "failed":
        steps = len(run.metrics)
        failed = "The end of the run" if steps == run.planned else f"Step {steps + 1}"
        text = f"{failed} failed: {end.cause}"
    elif end.kind == "ended":
        text = f"It ended early: {end.cause}"
    else:
        text = end.cause
    command = f"cotune train --resume {run.path}"
    if state == "finished" or command in remedy:
        command = ""
    return Ending(text=text, remedy=remedy, command=command)
