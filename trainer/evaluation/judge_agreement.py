"""`cotune judge`: how far a judge, or any scorer, agrees with people's labels of recorded candidates and episodes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from scipy import stats

from cotune.episodes.rescore import score_calls
from cotune.episodes.run_sync import run_sync
from cotune.episodes.workflows import Workflow, load_workflow
from cotune.errors import ConfigError, WorkflowError
from cotune.intervals import LEVEL, Interval, Z, wilson
from cotune.judging.episodes import outcomes_of
from cotune.records.ids import candidate_id
from cotune.sampling.scoring import Scored
from cotune.storage.judge_ledger import run_folder, totals_of
from cotune.storage.open_store import folder_of, open_store, without_password
from cotune.storage.protocol import Store
from cotune.storage.run_code import import_as_run_did, redactor_of
from cotune.storage.run_layout import is_run, known_workflow, read_run_json
from cotune.tables import grid
from cotune.trainer.evaluation.labels import EXAMPLE, labelled, load_labels
from cotune.trainer.evaluation.statistics import mean, shown

if TYPE_CHECKING:
    from rich.console import Group

EPISODES = "(episodes)"
"""In place of a role, where whole episodes are compared."""


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """One group: labels and rewards of the members that have both, aligned."""

    role: str
    labels: list[float]
    rewards: list[float]


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """How far rewards agree with labels. `accuracy` is the share of pairs that people tell apart in which the judge
    prefers the same one, ties counted half; `tau` the mean of Kendall's tau-b over groups."""

    groups: int
    labels: int
    pairs: int
    accuracy: Interval | None
    tau: Interval | None


class AgreementReport(msgspec.Struct, frozen=True, kw_only=True):
    """Agreement by role and in all, and the labels left out, by reason. `spent` is what judges used meanwhile."""

    by_role: dict[str, Agreement]
    all: Agreement
    left_out: dict[str, int]
    spent: dict[str, float]


def judge_agreement(run: str | Path, labels: str | Path, app: str | None = None) -> AgreementReport:
    """Score the labelled candidates and episodes of a run, or of a records file, with the scorers and the judge of the
    workflow `app` (default: the one that was trained), and compare with the labels in a JSON-lines file.

    A labelled candidate is ranked among all candidates of its call, a labelled episode among those of its task that
    have labels. Raises ConfigError for labels that are broken, of unknown ids, or that leave nothing to compare.
    """
    given = load_labels(labels)
    described = read_run_json(run) if is_run(run) else {}
    app = app or known_workflow(described, Path(run).absolute())
    if app is None:
        fault = f"is missing: {without_password(run)} does not say which workflow it recorded"
        raise ConfigError("app", None, fault, "Pass --app app:solve.")
    folder = folder_of(run)
    import_as_run_did(described)
    workflow = load_workflow(app).redacted(redactor_of(folder))
    before = totals_of(folder) if folder else {}
    with open_store(run, read_only=True) as store:
        compared, left_out = run_sync(_compared(store, workflow, given, folder, str(labels)))
    now = totals_of(folder) if folder else {}
    by_role: dict[str, list[Compared]] = {}
    for group in compared:
        by_role.setdefault(group.role, []).append(group)
    return AgreementReport(
        by_role={role: agreement(groups) for role, groups in sorted(by_role.items())},
        all=agreement(compared),
        left_out=left_out,
        spent={name: value - before.get(name, 0) for name, value in now.items() if value != before.get(name, 0)},
    )


def agreement(groups: Sequence[Compared]) -> Agreement:
    """Agreement over groups. The interval of `accuracy` is Wilson's, with pairs counted as the groups that they come
    from allow: pairs of one group say less than as many of different ones (Rao and Scott 1992, Biometrics 48, 577-585).
    That of `tau` is Student's over groups; groups with all labels or all rewards equal have none."""
    right = [_right(group) for group in groups]
    taus = [float(stats.kendalltau(group.labels, group.rewards).statistic) for group in groups if len(group.labels) > 1]
    return Agreement(
        groups=len(groups),
        labels=sum(len(group.labels) for group in groups),
        pairs=sum(pairs for _, pairs in right),
        accuracy=clustered_share([(got, pairs) for got, pairs in right if pairs]),
        tau=mean([tau for tau in taus if math.isfinite(tau)], (-1.0, 1.0)),
    )


def clustered_share(clusters: Sequence[tuple[float, int]]) -> Interval | None:
    """Share over clusters of (successes, trials), with Wilson's interval at the effective number of trials.

    That is their number over the design effect: the ratio estimator's variance over the binomial one, at least 1, which
    few clusters tell badly (Korn and Graubard 1998, Survey Methodology 24, 193-201, for its degrees of freedom). Where
    all succeed, or none, nothing tells it: each cluster then counts about once. None without trials; no interval from
    one cluster.
    """
    trials, count = sum(n for _, n in clusters), len(clusters)
    if not trials:
        return None
    p = sum(got for got, _ in clusters) / trials
    if count == 1:
        return Interval(mean=p, n=trials)
    largest = sum(n * n for _, n in clusters) / trials
    effect = largest
    if 0.0 < p < 1.0 and largest > 1.0:
        spread = count / (count - 1) * sum((got - p * n) ** 2 for got, n in clusters) / trials**2
        freedom = (float(stats.t.ppf(0.5 + LEVEL / 2, count - 1)) / Z) ** 2
        effect = freedom * max(1.0, spread * max(trials - 1, 1) / (p * (1 - p)))
    low, high = wilson(p, trials / effect)
    return Interval(mean=p, low=low, high=high, n=trials)


def _right(group: Compared) -> tuple[float, int]:
    """Pairs in which the judge prefers the same one, ties as a half, of those that people tell apart."""
    upper = np.triu_indices(len(group.labels), 1)
    # +1, 0 or -1 for each pair: which of the two people prefer, and which the judge.
    people, judge = (np.sign(np.subtract.outer(of, of))[upper] for of in (group.labels, group.rewards))
    alike = (people * judge)[people != 0]
    return float((1.0 + alike).sum() / 2), len(alike)


async def _compared(
    store: Store, workflow: Workflow, labels: Mapping[str, float], folder: Path | None, source: str
) -> tuple[list[Compared], dict[str, int]]:
    run_folder.set(folder)
    calls, episodes = labelled(store, labels, source)
    for role in sorted({call.role for call, _ in calls} - workflow.scorers.keys()):
        able = ", ".join(sorted(workflow.scorers)) or "none"
        raise ConfigError(
            "labels", role, f"is a role without a scorer; roles with one: {able}", f"Add @solve.scorer({role!r})."
        )
    if episodes and workflow.episode_judge is None:
        remedy = "Add @solve.judge, or leave those labels out."
        raise ConfigError("labels", episodes[0].id, "is an episode, and the workflow has no judge of episodes", remedy)
    left_out: Counter[str] = Counter()
    outcomes = await outcomes_of(workflow.episode_judge, store, episodes, redaction=workflow.redaction)
    scored = {**outcomes, **await score_calls(workflow, store, calls)}
    groups: dict[tuple[str, str], list[str]] = {}
    for call, _ in calls:
        ids = [candidate_id(call.id, candidate.index) for candidate in call.candidates]
        groups[call.role, call.id] = [one for one in ids if one in labels]
    for episode in episodes:
        groups.setdefault((EPISODES, episode.task.id), []).append(episode.id)
    compared = []
    for (role, _), members in groups.items():
        given = {one: found.rewards for one in members if isinstance(found := scored.get(one), Scored)}
        known = {one: sum(rewards.values()) for one, rewards in given.items() if rewards}
        left_out.update(str(e) for one in members if isinstance(e := scored.get(one), WorkflowError))
        if len(members) < 2:
            left_out["alone in its group"] += 1
        elif len(known) > 1:
            compared.append(Compared(role=role, labels=[labels[one] for one in known], rewards=list(known.values())))
    if not compared:
        why = "; ".join(f"{count} x {reason}" for reason, count in left_out.items()) or "nothing was scored"
        raise ConfigError(
            "labels",
            source,
            f"leaves nothing to compare: a call needs two labelled candidates, a task two labelled episodes ({why})",
            EXAMPLE,
        )
    return compared, dict(left_out)


def render(report: AgreementReport) -> Group:
    """The report as a table, and a verdict on the judge."""
    from rich.console import Group
    from rich.text import Text

    table = grid("role", "groups>", "labels>", "pairs>", "pairs alike", "Kendall's tau")
    rows = {**report.by_role, **({"all": report.all} if len(report.by_role) > 1 else {})}
    for role, found in rows.items():
        numbers = map(str, (found.groups, found.labels, found.pairs))
        table.add_row(role, *numbers, shown(found.accuracy, ".1%"), shown(found.tau, "+.2f"))
    left_out = [f"left out: {count} x {reason}" for reason, count in report.left_out.items()]
    spent = ", ".join(f"{name} {value:g}" for name, value in report.spent.items())
    return Group(
        table, *(Text(line) for line in (*left_out, *([f"judge: {spent}"] if spent else ()), verdict(report.all)))
    )


def verdict(found: Agreement) -> str:
    """Whether the judge prefers what people prefer more often than chance does, in one sentence."""
    if found.accuracy is None:
        return "the labels of each group are equal: no pair tells whether the judge agrees"
    if found.accuracy.low is None or found.accuracy.high is None:
        return "one group tells little: label candidates of more calls"
    share = shown(found.accuracy, ".1%")
    if found.accuracy.low > 0.5:
        return f"the judge agrees with people more often than chance: {share} of {found.pairs} pairs"
    if found.accuracy.high < 0.5:
        return f"the judge prefers what people do not: {share} of {found.pairs} pairs alike"
    return f"not shown to agree more often than chance ({share}): take more labels, or another rubric"
