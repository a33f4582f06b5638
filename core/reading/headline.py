"""The figures of a run, the most telling first, and the verdict of its newest evaluation.

First the held-out single samples of base and trained; then mean rewards of all candidates by role; figures of a path
that was chosen among candidates come last, and under that name: they are no success rate of one sample.
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
"""The `path` of a step whose episodes are played as the policies play them."""
PLAIN, PLAIN_COLUMN = "plain outcome (not what is trained on)", "plain outcome, not trained on"
"""Names, in text and as a column, the sum of an outcome's components where the trained reward is another."""
STARTS = ("base", "start")
"""The modes that training compares its own evaluations with: the untrained model, or the weights of `init`."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of a run, at its beginning where that is known and at its end.

    `kind` names its source: `held_out`: single samples on held-out tasks; `role`: all candidates of a role;
    `loss`: of a role that learns from records (lower is better); `training`: single samples on training tasks;
    `selected`: paths chosen among candidates; `recorded`: episodes of records without training.
    `tasks` is the name of the set of held-out tasks that it is of, empty for other figures.
    `first_of` and `last_of` say whose the two are (`base`, `trained`, `step 3`); `difference` is paired by task.
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
    """The figures of a run, the most telling first. `evaluation` is the one that the held-out figures are from, and
    `verdict` its sentence on trained against base; empty where the two were not compared."""

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
    """The headline from the lines of metrics.jsonl, the run's evaluations (oldest first) and its records, whose failed
    episodes count as `on_failure` says. Where all policies are `taught`, rewards count for nothing. `held_out_tasks`
    names the tasks that training evaluates on."""
    newest = next((found for found in reversed(evaluations) if compared_modes(found)), None)
    held_out = [*_evaluated(newest, held_out_tasks)] if newest else [*_held_out_lines(lines, held_out_tasks)]
    held_out += _against_untrained(lines, held_out_tasks)
    distances = _by_role(lines, "kl", "loss", "distance of {} from the teacher", _DISTANCE) if taught else ()
    found = [*held_out, *_losses(lines), *distances, *role_rewards(lines, trained=not taught), *_outcomes(lines)]
    if not found and store is not None:
        found = [*_recorded(store, on_failure)]
    compared = newest.comparison(*compared_modes(newest)) if newest else None
    return Headline(changes=tuple(found), evaluation=newest, verdict=compared.verdict if compared else "")


def role_rewards(lines: Sequence[Line], *, trained: bool = True) -> Iterator[Change]:
    """Mean reward of all candidates of each role, chosen or not, in the first and the last step that has any."""
    what = f"mean reward of all the role's candidates{'' if trained else ', which nothing is trained on'}"
    return _by_role(lines, "reward", "role", "reward of {}", what)


def _by_role(lines: Sequence[Line], figure: str, kind: Kind, name: str, what: str) -> Iterator[Change]:
    for role in _roles(lines):
        yield from _change(name.format(role), kind, what, _of_role(lines, role, figure))


def _roles(lines: Sequence[Line]) -> list[str]:
    return sorted({role for line in lines for role in line.get("roles", {})})


def compared_modes(evaluation: StoredEvaluation) -> tuple[str, str] | tuple[()]:
    """The mode that a headline takes of an evaluation, and the one to compare it with; empty without one."""
    played = evaluation.evaluations
    start = next((name for name in STARTS if name in played), None)
    if "trained" in played:
        return "trained", start or "base"
    return (start, "") if start and evaluation.name.startswith(IN_TRAINING) else ()


def _evaluated(evaluation: StoredEvaluation, held_out_tasks: str) -> Iterator[Change]:
    """Success and reward of base and trained in an evaluation."""
    mode, base = compared_modes(evaluation) or ("", "")
    after, before = evaluation.evaluations[mode], evaluation.evaluations.get(base)
    compared = evaluation.comparison(mode, base)
    for name, what in _HELD_OUT.items():
        last = getattr(after, name)
        if last is None:
            continue
        if name == "outcome" and last == after.success and (before is None or before.outcome == before.success):
            continue  # the workflow returned a bool, so both are one figure
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


def _held_out_lines(lines: Sequence[Line], tasks: str) -> Iterator[Change]:
    """The same from metrics.jsonl alone, where training kept no file of its evaluations."""
    success: dict[int, Interval] = {}
    for name, what in _HELD_OUT.items():
        known = {
            line["step"] + 1: Interval(
                mean=own[name],
                low=own.get(f"{name}_low"),
                high=own.get(f"{name}_high"),
                n=int(n) if math.isfinite(n := own.get(f"{name}_n", own.get("episodes", 0))) else 0,
            )
            for line in lines
            if name in (own := line.get("held_out") or {})
        }
        if name == "success":
            success = known
        elif name == "outcome" and known == success:
            continue  # the workflow returned a bool, so both are one figure
        title = f"held-out {PLAIN if name == 'outcome' else name}"
        yield from _change(title, "held_out", what, known, percent=name == "success", tasks=tasks)


def _against_untrained(lines: Sequence[Line], tasks: str) -> Iterator[Change]:
    """The rewards of roles that play against each other: each on held-out tasks against the untrained model."""
    figures = {line["step"] + 1: line.get("held_out") or {} for line in lines}
    for key in sorted({key for found in figures.values() for key in found if key.startswith("against_untrained/")}):
        name = f"held-out reward of {key.partition('/')[2]} against the untrained model"
        what = "mean reward of the role on held-out tasks, one sample each, with the untrained model in the other roles"
        known = {step: Interval(mean=found[key]) for step, found in figures.items() if key in found}
        yield from _change(name, "held_out", what, known, tasks=tasks)


def _losses(lines: Sequence[Line]) -> Iterator[Change]:
    """Of roles that learn from records: the held-out loss whose weights are kept, else the loss; and the share of pairs
    that are ranked right."""
    for role in _roles(lines):
        held_out, loss, accuracy = (_of_role(lines, role, name) for name in ("held_out_loss", "loss", "accuracy"))
        if held_out:
            best = min(held_out, key=lambda step: (held_out[step].mean, step))
            until = {step: found for step, found in held_out.items() if step <= best}
            what = "lowest loss on records that are not trained on: the policy ends with these weights"
            yield from _change(f"held-out loss of {role}", "loss", what, until)
        else:
            yield from _change(f"loss of {role}", "loss", "loss on the records of a step", loss)
        what = "share of a step's pairs in which the better answer is the likelier one"
        yield from _change(f"pairs of {role} ranked right", "loss", what, accuracy, percent=True)


_DISTANCE = "divergence from the teacher on what the role samples, in nats per token: what is trained, lower is nearer"


def _of_role(lines: Sequence[Line], role: str, name: str) -> dict[int, Interval]:
    figures = ((line["step"] + 1, line.get("roles", {}).get(role, {}).get(name)) for line in lines)
    return {step: Interval(mean=value) for step, value in figures if value is not None}


def _outcomes(lines: Sequence[Line]) -> Iterator[Change]:
    """Mean outcomes of training episodes, under the name of the path that they are of."""
    if not lines:
        return
    path = lines[-1].get("path") or SINGLE
    names = sorted({name for line in lines for name in line["outcome"]}, key=lambda name: (name != "success", name))
    for name in names:
        percent = name == "success"
        known = {line["step"] + 1: _outcome(name, line) for line in lines if line["outcome"].get(name) is not None}
        if path == SINGLE:
            what = "mean over a step's episodes, single samples"
            yield from _change(f"{name} in training", "training", what, known, percent=percent)
        else:
            what = f"mean over a step's episodes of the {path}: not what one sample reaches"
            yield from _change(f"{path}, {name}", "selected", what, known, percent=percent)


def _outcome(name: str, line: Line) -> Interval:
    # No interval: a line does not say how many tasks its episodes are of.
    return Interval(mean=float(line["outcome"][name]), n=int(line.get("episodes", 0)))


def _change(
    name: str, kind: Kind, what: str, known: Mapping[int, Interval], *, percent: bool = False, tasks: str = ""
) -> Iterator[Change]:
    """From the first to the last of a figure's values by step, if there are any."""
    steps = sorted(known)
    if not steps:
        return
    first, last = steps[0], steps[-1]
    yield Change(
        name=name,
        kind=kind,
        what=what,
        tasks=tasks,
        first=known[first] if first != last else None,
        first_of=f"step {first}" if first != last else "",
        last=known[last],
        last_of=f"step {last}",
        percent=percent,
    )


def _recorded(store: Store, on_failure: str) -> Iterator[Change]:
    """Success and rewards of recorded episodes, each phase by itself; failed ones count."""
    figures = store.figures()
    successes = [row for row in figures.success_counts() if row.phase != "check"]
    rewards = [row for row in figures.outcome_means(on_failure) if row.mean is not None and row.phase != "check"]
    phases = {row.phase for row in successes} | {row.phase for row in rewards}
    several = len(phases) > 1
    for row in successes:
        if share := share_over_tasks(row.solved, row.episodes, row.squares):
            name = f"success of {row.phase}" if several else "success"
            what = "share of recorded episodes that solved their task"
            yield Change(name=name, kind="recorded", what=what, last=share, last_of=row.phase, percent=True)
    for reward in rewards:
        assert reward.mean is not None
        name = f"{reward.name} of {reward.phase}" if several else str(reward.name)
        what, mean = "mean reward of recorded episodes", Interval(mean=reward.mean, n=reward.episodes)
        yield Change(name=name, kind="recorded", what=what, last=mean, last_of=reward.phase)
