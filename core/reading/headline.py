"""The figures of a run, the most telling first, and the verdict of its newest evaluation.

First come the held-out single samples of base and trained, then the mean rewards of all candidates by role. Figures of
a path that was chosen among candidates come last, under the name of the path: they are not the success rate of one
sample.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from cotune.intervals import Interval, share_over_tasks
from cotune.reading.evaluations import IN_TRAINING, EvaluatedMode, StoredEvaluation
from cotune.reading.task_sets import evaluated_set
from cotune.storage.protocol import Store

Kind = Literal["held_out", "role", "loss", "training", "selected", "recorded"]
Line = Mapping[str, Any]

SINGLE = "single samples"
"""The `path` of a step whose episodes are single samples: nothing was selected among candidates."""
PLAIN = "plain outcome (not what is trained on)"
PLAIN_COLUMN = "plain outcome, not trained on"
"""The name, in text and as a column, of the sum of an outcome's components if another reward is trained on."""
STARTS = ("base", "start")
"""The modes with which training compares its evaluations: the untrained model, or the weights of `init`."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of a run, at its end and, if known, at its beginning.

    `kind` names its source: `held_out`: single samples on held-out tasks; `role`: all candidates of a role;
    `loss`: a role that learns from records (lower is better); `training`: single samples on training tasks;
    `selected`: paths chosen among candidates; `recorded`: episodes of records without training.
    `tasks` is the name of the set of held-out tasks, empty for other figures. `first_of` and `last_of` name the sources
    of the two values (`base`, `trained`, `step 3`); `difference` is paired by task.
    """

    name: str
    kind: Kind
    what: str
    tasks: str = ""
    first: Interval | None = None
    first_of: str = ""
    first_failed: int = 0
    last: Interval
    last_of: str = ""
    last_failed: int = 0
    difference: Interval | None = None
    percent: bool = False


class Headline(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a run, the most telling first. `evaluation` is the source of the held-out figures, and `verdict`
    its sentence on trained against base; empty if the two were not compared."""

    changes: tuple[Change, ...] = ()
    evaluation: StoredEvaluation | None = None
    verdict: str = ""


def headline(
    lines: Sequence[Line],
    evaluations: Sequence[StoredEvaluation],
    store: Store | None = None,
    on_failure: str = "lowest",
    *,
    taught: bool = False,
    held_out_tasks: str = "",
) -> Headline:
    """The headline from the lines of metrics.jsonl, the run's evaluations (oldest first) and its records.

    Failed episodes of the records count as the setting `on_failure` says. `taught` is whether all policies learn from a
    teacher, so that rewards are not trained on. `held_out_tasks` names the tasks that training evaluates on.
    """
    newest = next((stored for stored in reversed(evaluations) if compared_modes(stored)), None)
    changes: list[Change] = []
    if newest:
        changes += _held_out_of_evaluation(newest, held_out_tasks)
    else:
        changes += _held_out_of_metrics(lines, held_out_tasks)
    changes += _against_untrained(lines, held_out_tasks)
    changes += _losses(lines)
    if taught:
        changes += _by_role(lines, "kl", "loss", "distance of {} from the teacher", _DISTANCE)
    changes += role_rewards(lines, trained=not taught)
    changes += _outcomes(lines)
    if not changes and store is not None:
        changes += _recorded(store, on_failure)
    verdict = ""
    if newest:
        comparison = newest.comparison(*compared_modes(newest))
        verdict = comparison.verdict if comparison else ""
    return Headline(changes=tuple(changes), evaluation=newest, verdict=verdict)


def role_rewards(lines: Sequence[Line], *, trained: bool = True) -> Iterator[Change]:
    """Mean reward of all candidates of each role, chosen or not, in the first and the last step with a reward."""
    what = "mean reward of all the role's candidates"
    if not trained:
        what += ", which nothing is trained on"
    return _by_role(lines, "reward", "role", "reward of {}", what)


def _by_role(lines: Sequence[Line], figure: str, kind: Kind, name: str, what: str) -> Iterator[Change]:
    """The change of a figure for each role. `name` is the name of the change with {} in place of the role."""
    for role in _roles(lines):
        yield from _change(name.format(role), kind, what, _figure_of_role(lines, role, figure))


def _roles(lines: Sequence[Line]) -> list[str]:
    """The roles that any step has figures of."""
    return sorted({role for line in lines for role in line.get("roles", {})})


def compared_modes(evaluation: StoredEvaluation) -> tuple[str, str] | tuple[()]:
    """The mode of an evaluation that a headline shows, and the mode to compare it with; empty without one."""
    modes = evaluation.evaluations
    start = next((name for name in STARTS if name in modes), None)
    if "trained" in modes:
        return "trained", start or "base"
    if start and evaluation.name.startswith(IN_TRAINING):  # the evaluation before the first step
        return start, ""
    return ()


def _held_out_of_evaluation(evaluation: StoredEvaluation, held_out_tasks: str) -> Iterator[Change]:
    """The changes of success, reward and outcome from the base to the trained policies in an evaluation."""
    mode, base = compared_modes(evaluation) or ("", "")
    after = evaluation.evaluations[mode]
    before = evaluation.evaluations.get(base)
    compared = evaluation.comparison(mode, base)
    # A workflow that returns a bool has one figure under two names.
    outcome_is_success = after.outcome == after.success and (before is None or before.outcome == before.success)
    for name, what in _HELD_OUT.items():
        last = getattr(after, name)
        if last is None or (name == "outcome" and outcome_is_success):
            continue
        yield Change(
            name=f"held-out {PLAIN if name == 'outcome' else name}",
            kind="held_out",
            what=what,
            tasks=evaluated_set(evaluation, held_out_tasks),
            first=getattr(before, name) if before else None,
            first_of=base if before else "",
            first_failed=_failures(before),
            last=last,
            last_of=mode,
            last_failed=_failures(after),
            difference=getattr(compared, name) if compared else None,
            percent=name == "success",
        )


_HELD_OUT = {
    "success": "share of held-out tasks solved, one sample each, nothing selected",
    "reward": "mean reward that is trained on, on held-out tasks, one sample each, nothing selected",
    "outcome": "mean sum of the outcome on held-out tasks, one sample each, nothing selected",
}


def _failures(mode: EvaluatedMode | None) -> int:
    return mode.failures if mode else 0


def _held_out_of_metrics(lines: Sequence[Line], tasks: str) -> Iterator[Change]:
    """The changes of held-out success, reward and outcome by metrics.jsonl, for a run without files of its
    evaluations."""
    success: dict[int, Interval] = {}
    for name, what in _HELD_OUT.items():
        by_step: dict[int, Interval] = {}
        for line in lines:
            figures = line.get("held_out") or {}
            if name not in figures:
                continue
            n_tasks = figures.get(f"{name}_n", figures.get("episodes", 0))
            by_step[line["step"] + 1] = Interval(
                mean=figures[name],
                low=figures.get(f"{name}_low"),
                high=figures.get(f"{name}_high"),
                n=int(n_tasks) if math.isfinite(n_tasks) else 0,
            )
        if name == "success":
            success = by_step
        elif name == "outcome" and by_step == success:
            continue  # the workflow returned a bool, so both are one figure
        title = f"held-out {PLAIN if name == 'outcome' else name}"
        yield from _change(title, "held_out", what, by_step, percent=name == "success", tasks=tasks)


def _against_untrained(lines: Sequence[Line], tasks: str) -> Iterator[Change]:
    """The rewards of roles that play against each other: each on held-out tasks against the untrained model."""
    by_key: dict[str, dict[int, Interval]] = {}
    for line in lines:
        for key, value in (line.get("held_out") or {}).items():
            if key.startswith("against_untrained/"):
                by_key.setdefault(key, {})[line["step"] + 1] = Interval(mean=value)
    for key, by_step in sorted(by_key.items()):
        name = f"held-out reward of {key.partition('/')[2]} against the untrained model"
        what = "mean reward of the role on held-out tasks, one sample each, with the untrained model in the other roles"
        yield from _change(name, "held_out", what, by_step, tasks=tasks)


def _losses(lines: Sequence[Line]) -> Iterator[Change]:
    """The figures of roles that learn from recorded answers: their loss, and the share of pairs ranked right.

    With held-out records it is the lowest held-out loss up to now, because the policy ends with the weights of that
    step.
    """
    for role in _roles(lines):
        held_out = _figure_of_role(lines, role, "held_out_loss")
        if held_out:
            best_step = min(held_out, key=lambda step: (held_out[step].mean, step))
            until_best = {step: interval for step, interval in held_out.items() if step <= best_step}
            what = "lowest loss on records that are not trained on: the policy ends with these weights"
            yield from _change(f"held-out loss of {role}", "loss", what, until_best)
        else:
            loss = _figure_of_role(lines, role, "loss")
            yield from _change(f"loss of {role}", "loss", "loss on the records of a step", loss)
        accuracy = _figure_of_role(lines, role, "accuracy")
        what = "share of a step's pairs in which the better answer is the likelier one"
        yield from _change(f"pairs of {role} ranked right", "loss", what, accuracy, percent=True)


_DISTANCE = "divergence from the teacher on what the role samples, in nats per token: what is trained, lower is nearer"


def _figure_of_role(lines: Sequence[Line], role: str, name: str) -> dict[int, Interval]:
    """A figure of a role by step, counted from 1; steps without it are left out."""
    by_step: dict[int, Interval] = {}
    for line in lines:
        value = line.get("roles", {}).get(role, {}).get(name)
        if value is not None:
            by_step[line["step"] + 1] = Interval(mean=value)
    return by_step


def _outcomes(lines: Sequence[Line]) -> Iterator[Change]:
    """The changes of the mean outcomes in training. Under a tree plan, episodes follow the best candidates, so their
    outcomes are named after this path and marked as selected.
    """
    if not lines:
        return
    path = lines[-1].get("path") or SINGLE
    names: set[str] = set()
    for line in lines:
        names.update(line["outcome"])
    for name in sorted(names, key=lambda name: (name != "success", name)):  # success first
        percent = name == "success"
        by_step: dict[int, Interval] = {}
        for line in lines:
            mean = line["outcome"].get(name)
            if mean is not None:
                # No bounds: a line does not hold the number of tasks of its episodes.
                n_episodes = (line.get("outcome_n") or {}).get(name, 0)
                by_step[line["step"] + 1] = Interval(mean=float(mean), n=n_episodes)
        if path == SINGLE:
            what = "mean over a step's episodes, single samples"
            yield from _change(f"{name} in training", "training", what, by_step, percent=percent)
        else:
            what = f"mean over a step's episodes of the {path}: not what one sample reaches"
            yield from _change(f"{path}, {name}", "selected", what, by_step, percent=percent)


def _change(
    name: str, kind: Kind, what: str, by_step: Mapping[int, Interval], *, percent: bool = False, tasks: str = ""
) -> Iterator[Change]:
    """The change of a figure from its first to its last step, if it has values. `what` explains the figure.

    With values of a single step, there is a last value and no first.
    """
    if not by_step:
        return
    first_step = min(by_step)
    last_step = max(by_step)
    has_first = first_step != last_step
    yield Change(
        name=name,
        kind=kind,
        what=what,
        tasks=tasks,
        first=by_step[first_step] if has_first else None,
        first_of=f"step {first_step}" if has_first else "",
        last=by_step[last_step],
        last_of=f"step {last_step}",
        percent=percent,
    )


def _recorded(store: Store, on_failure: str) -> Iterator[Change]:
    """Success and mean rewards of recorded episodes, for each phase that has them. Failed episodes count as well.

    Figures are named after their phase if there are several.
    """
    figures = store.figures()
    successes = [row for row in figures.success_counts() if row.phase != "check"]
    rewards = [row for row in figures.outcome_means(on_failure) if row.mean is not None and row.phase != "check"]
    phases = {row.phase for row in successes} | {row.phase for row in rewards}
    names_phase = len(phases) > 1
    for row in successes:
        if share := share_over_tasks(row.solved, row.episodes, row.squares):
            name = f"success of {row.phase}" if names_phase else "success"
            what = "share of recorded episodes that solved their task"
            yield Change(name=name, kind="recorded", what=what, last=share, last_of=row.phase, percent=True)
    for reward in rewards:
        assert reward.mean is not None
        name = f"{reward.name} of {reward.phase}" if names_phase else str(reward.name)
        what = "mean reward of recorded episodes"
        mean = Interval(mean=reward.mean, n=reward.episodes)
        yield Change(name=name, kind="recorded", what=what, last=mean, last_of=reward.phase)
