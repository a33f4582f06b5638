"""All assignments of models to the roles of an application (`cotune eval --base A --base B --pairs`).

The roles and the tokens of an episode are not known before the application runs, so it first runs on a few tasks with
the first model in every role. From these the command estimates all that follows, and it stops above a limit.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from msgspec.structs import replace

from cotune.episodes.rollout import EpisodeBatch
from cotune.episodes.workflows import Workflow
from cotune.errors import ConfigError, WorkflowError
from cotune.reading.evaluations import EvaluatedMode, EvaluationReport, RoleEffect
from cotune.recording.recorder import Nowhere
from cotune.records.prices import Prices, money
from cotune.records.structs import PolicyRef
from cotune.sampling.responder import PolicyResponder
from cotune.tables import plural
from cotune.trainer.evaluation.modes import Contest, Mode, OtherPlayers, Side, Temperature, contest_of_sides
from cotune.trainer.evaluation.run import evaluate_episodes
from cotune.trainer.evaluation.statistics import paired_difference

PROBED = 3
"""Tasks that show which roles there are, and what an episode takes."""

Assignment = Mapping[str, str]
"""The model of each role."""


@dataclass(frozen=True)
class RoleUse:
    """The calls of a role, and their tokens, in one episode."""

    calls: float
    prompt_tokens: float
    completion_tokens: float


async def probe_roles(
    workflow: Workflow, batch: EpisodeBatch, responder: PolicyResponder, first: str
) -> dict[str, RoleUse]:
    """The roles of an application and what each takes in an episode, from a few tasks with the model `first` in every
    role. Nothing of it is stored. Raises WorkflowError if every episode failed, or if no role was asked."""
    player = dataclasses.replace(responder, policies={}, others=PolicyRef(first), provider_roles=())
    some = replace(batch, tasks=batch.tasks[:PROBED], rollouts=1, sink=Nowhere(), phase="eval-probe")
    probed = await evaluate_episodes(workflow, some, player, label=first)
    if cause := probed.all_failed:
        tried = plural(probed.episodes, "task")
        raise WorkflowError(
            f"With {first} in every role the application failed on the first {tried}: {cause}",
            "Fix that first; cotune check runs the application without a model.",
        )
    if not probed.roles:
        raise WorkflowError("No role was asked on the first tasks.", "Check that the application calls its models.")
    uses: dict[str, RoleUse] = {}
    for role, found in probed.roles.items():
        calls = found.calls / probed.episodes
        uses[role] = RoleUse(calls, calls * found.prompt_tokens, calls * found.completion_tokens)
    return uses


def all_assignments(models: Sequence[str], roles: Sequence[str]) -> dict[str, Assignment]:
    """Every assignment of models to roles, by label. One model in all roles has the name of the model."""
    assignments: dict[str, Assignment] = {}
    for players in itertools.product(models, repeat=len(roles)):
        assignment = dict(zip(roles, players, strict=True))
        same = len(set(players)) == 1
        label = players[0] if same else " ".join(f"{role}={model}" for role, model in assignment.items())
        assignments[label] = assignment
    return assignments


def kind_of(assignment: Assignment) -> str:
    """`solo` for an application of one role, `homogeneous` for one model in all roles, else `mixed`."""
    if len(assignment) == 1:
        return "solo"
    return "homogeneous" if len(set(assignment.values())) == 1 else "mixed"


def estimate(models: Sequence[str], uses: Mapping[str, RoleUse], episodes: int, prices: Prices) -> str:
    """A sentence on what all assignments will take, `episodes` each. They are counted and not listed: three models and
    fifteen roles have 14 million."""
    assignments = len(models) ** len(uses)
    total = assignments * episodes
    calls = total * sum(use.calls for use in uses.values())
    tokens = total * sum(use.prompt_tokens + use.completion_tokens for use in uses.values())
    money_said = ""
    if all(model in prices for model in models):
        # Each model plays each role in an equal share of the assignments.
        cost = 0.0
        for model in models:
            for use in uses.values():
                cost += total / len(models) * money(prices[model], use.prompt_tokens, use.completion_tokens)
        money_said = f", cost about {cost:.4g}"
    return (
        f"{plural(assignments, 'assignment')} of models to {', '.join(uses)}: {plural(total, 'episode')}, "
        f"about {calls:,.0f} calls and {tokens:,.0f} tokens{money_said}"
    )


def check_limit(assignments: int, episodes: int, limit: int) -> None:
    """Raises ConfigError if so many assignments take more episodes than `limit`."""
    total = assignments * episodes
    if total > limit:
        fault = f"is below the {total:,} episodes of {assignments:,} assignments"
        remedy = f"Allow them with --pairs {total}, or pass fewer tasks, samples or models."
        raise ConfigError("max_episodes", limit, fault, remedy)


def contest_of_assignments(
    assignments: Mapping[str, Assignment], first: str, modes: Collection[Mode], temperature: Temperature
) -> Contest:
    """A side for each assignment, each compared with the model `first` in all roles. A role that appears later than the
    assignments were made is played by `first`, and the report says so."""
    sides = {
        label: Side(
            {role: PolicyRef(model) for role, model in assignment.items()},
            OtherPlayers(PolicyRef(first)),
        )
        for label, assignment in assignments.items()
    }
    opponents = [(label, [first]) for label in sides if label != first]
    return contest_of_sides(sides, opponents, [mode for mode in modes if mode != "base"], temperature)


def with_assignments(report: EvaluationReport, assignments: Mapping[str, Assignment]) -> EvaluationReport:
    """The report with its assignments and with the effect of each model in each role."""
    known = {label: dict(assignment) for label, assignment in assignments.items()}
    shown = sum(comparison.label in assignments for comparison in report.comparisons)
    notes = list(report.notes)
    if shown > 1:
        notes.append(f"Of {shown} comparisons with one assignment, about 1 in 20 shows a difference by chance.")
    effects = role_effects(report.evaluations, assignments)
    return replace(report, assignments=known, effects=tuple(effects), notes=tuple(notes))


def role_effects(evaluations: Mapping[str, EvaluatedMode], assignments: Mapping[str, Assignment]) -> list[RoleEffect]:
    """What each model is worth in each role, against the first model there: the mean difference over all assignments of
    the other roles, by task, with an interval over tasks. Of success, or of rewards if the workflow reports no success.
    Assignments in which every episode failed are left out."""
    sound = [label for label in assignments if evaluations[label].all_failed is None]
    has_success = bool(sound) and all(evaluations[label].successes for label in sound)
    scores = {label: evaluations[label].successes if has_success else evaluations[label].rewards for label in sound}
    label_of = {tuple(sorted(assignments[label].items())): label for label in sound}
    roles = list(next(iter(assignments.values())))
    models = list(dict.fromkeys(model for assignment in assignments.values() for model in assignment.values()))

    effects: list[RoleEffect] = []
    for role, model in itertools.product(roles, models[1:]):
        with_model: dict[str, list[float]] = {}
        with_first: dict[str, list[float]] = {}
        for label in sound:
            if assignments[label][role] != model:
                continue
            other = label_of.get(tuple(sorted({**assignments[label], role: models[0]}.items())))
            if other is None:
                continue
            for task in scores[label].keys() & scores[other].keys():
                with_model.setdefault(task, []).append(scores[label][task])
                with_first.setdefault(task, []).append(scores[other][task])
        difference = paired_difference(
            {task: fmean(values) for task, values in with_model.items()},
            {task: fmean(values) for task, values in with_first.items()},
        )
        if difference is not None:
            effects.append(
                RoleEffect(role=role, model=model, against=models[0], difference=difference, of_success=has_success)
            )
    return effects
