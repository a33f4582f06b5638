"""All assignments of models to the roles of an application (`cotune eval --base A --base B --pairs`).

The roles and the tokens of an episode are not known before the application runs, so it first runs on a few tasks with
the first model in every role. From these the command estimates the calls and tokens of all assignments, and stops if
they take more episodes than allowed.
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
from cotune.intervals import Interval
from cotune.reading.evaluations import EvaluatedMode, EvaluationReport, RoleEffect
from cotune.recording.recorder import Nowhere
from cotune.records.prices import Prices, money
from cotune.records.structs import PolicyRef
from cotune.sampling.responder import PolicyResponder
from cotune.tables import plural
from cotune.trainer.evaluation.modes import Contest, Mode, OtherPlayers, Side, Temperature, contest_of_sides
from cotune.trainer.evaluation.run import evaluate_episodes
from cotune.trainer.evaluation.statistics import paired_difference

PROBE_TASKS = 3
"""Number of tasks on which the application runs first, to find its roles and the tokens of an episode."""

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
    """Find the roles of an application, with the calls and tokens of each in an episode, by running it on a few tasks
    with the model `first` in every role.

    Nothing of this is stored. Raises WorkflowError if every episode failed, or if the application called no role.
    """
    first_in_every_role = dataclasses.replace(responder, policies={}, others=PolicyRef(first), provider_roles=())
    first_tasks = replace(batch, tasks=batch.tasks[:PROBE_TASKS], rollouts=1, sink=Nowhere(), phase="eval-probe")
    probe = await evaluate_episodes(workflow, first_tasks, first_in_every_role, label=first)
    if cause := probe.all_failed:
        raise WorkflowError(
            f"With {first} in every role the application failed on the first {plural(probe.episodes, 'task')}: {cause}",
            "Fix that first; cotune check runs the application without a model.",
        )
    if not probe.roles:
        raise WorkflowError("No role was asked on the first tasks.", "Check that the application calls its models.")
    uses: dict[str, RoleUse] = {}
    for role, statistics in probe.roles.items():
        calls = statistics.calls / probe.episodes
        uses[role] = RoleUse(calls, calls * statistics.prompt_tokens, calls * statistics.completion_tokens)
    return uses


def all_assignments(models: Sequence[str], roles: Sequence[str]) -> dict[str, Assignment]:
    """Return every assignment of models to roles, by label. If one model plays all roles, the label is its name."""
    assignments: dict[str, Assignment] = {}
    for players in itertools.product(models, repeat=len(roles)):
        assignment = dict(zip(roles, players, strict=True))
        label = players[0]
        if len(set(players)) > 1:
            label = " ".join(f"{role}={model}" for role, model in assignment.items())
        assignments[label] = assignment
    return assignments


def kind_of(assignment: Assignment) -> str:
    """Return `solo` for an application with one role, `homogeneous` for one model in all roles, else `mixed`."""
    if len(assignment) == 1:
        return "solo"
    return "homogeneous" if len(set(assignment.values())) == 1 else "mixed"


def estimate(models: Sequence[str], uses: Mapping[str, RoleUse], episodes: int, prices: Prices) -> str:
    """Return a sentence that estimates the calls, tokens and cost of all assignments, with `episodes` for each."""
    # Assignments are counted, not listed: three models and fifteen roles have 14 million.
    assignments = len(models) ** len(uses)
    total = assignments * episodes
    calls = total * sum(use.calls for use in uses.values())
    tokens = total * sum(use.prompt_tokens + use.completion_tokens for use in uses.values())
    cost_text = ""
    if all(model in prices for model in models):
        # Each model plays each role in an equal share of the assignments.
        cost = 0.0
        for model in models:
            for use in uses.values():
                cost += total / len(models) * money(prices[model], use.prompt_tokens, use.completion_tokens)
        cost_text = f", cost about {cost:.4g}"
    return (
        f"{plural(assignments, 'assignment')} of models to {', '.join(uses)}: {plural(total, 'episode')}, "
        f"about {calls:,.0f} calls and {tokens:,.0f} tokens{cost_text}"
    )


def check_limit(assignments: int, episodes: int, limit: int) -> None:
    """Raise ConfigError if all assignments, with `episodes` for each, take more episodes than `limit`."""
    total = assignments * episodes
    if total > limit:
        fault = f"is below the {total:,} episodes of {assignments:,} assignments"
        remedy = f"Allow them with --pairs {total}, or pass fewer tasks, samples or models."
        raise ConfigError("max_episodes", limit, fault, remedy)


def contest_of_assignments(
    assignments: Mapping[str, Assignment], first: str, modes: Collection[Mode], temperature: Temperature
) -> Contest:
    """Compare each assignment with the model `first` in all roles.

    `first` also plays roles that appear only after the first tasks; the report has a note on these roles.
    """
    sides: dict[str, Side] = {}
    for label, assignment in assignments.items():
        policies = {role: PolicyRef(model) for role, model in assignment.items()}
        sides[label] = Side(policies, OtherPlayers(PolicyRef(first)))
    opponents = [(label, [first]) for label in sides if label != first]
    return contest_of_sides(sides, opponents, [mode for mode in modes if mode != "base"], temperature)


def with_assignments(report: EvaluationReport, assignments: Mapping[str, Assignment]) -> EvaluationReport:
    """Return the report with its assignments and the effect of each model in each role. An assignment says which model
    answers for each role."""
    comparisons = sum(comparison.label in assignments for comparison in report.comparisons)
    notes = list(report.notes)
    if comparisons > 1:
        notes.append(f"Of {comparisons} comparisons with one assignment, about 1 in 20 shows a difference by chance.")
    return replace(
        report,
        assignments={label: dict(assignment) for label, assignment in assignments.items()},
        effects=tuple(role_effects(report.evaluations, assignments)),
        notes=tuple(notes),
    )


def role_effects(evaluations: Mapping[str, EvaluatedMode], assignments: Mapping[str, Assignment]) -> list[RoleEffect]:
    """Return the effect of each model in each role, compared with the first model in that role.

    The effect is the mean difference over all assignments of the other roles, by task, with an interval over tasks. It
    is of success, or of rewards if the workflow reports no success. Assignments in which every episode failed are left
    out.
    """
    # 1. The scores of each assignment, by the models of all roles. All assignments have the roles in the same order.
    usable = [label for label in assignments if evaluations[label].all_failed is None]
    has_success = bool(usable) and all(evaluations[label].successes for label in usable)
    roles = list(next(iter(assignments.values())))
    scores_by_models: dict[tuple[str, ...], Mapping[str, float]] = {}
    for label in usable:
        evaluation = evaluations[label]
        models_of_roles = tuple(assignments[label][role] for role in roles)
        scores_by_models[models_of_roles] = evaluation.successes if has_success else evaluation.rewards

    # 2. The effect of each model but the first.
    distinct_models: dict[str, None] = {}
    for assignment in assignments.values():
        distinct_models |= dict.fromkeys(assignment.values())
    models = list(distinct_models)
    effects: list[RoleEffect] = []
    for index, role in enumerate(roles):
        for model in models[1:]:
            difference = _model_difference(scores_by_models, index, model, models[0])
            if difference is not None:
                effects.append(
                    RoleEffect(role=role, model=model, against=models[0], difference=difference, of_success=has_success)
                )
    return effects


def _model_difference(
    scores_by_models: Mapping[tuple[str, ...], Mapping[str, float]], index: int, model: str, first: str
) -> Interval | None:
    """Return the difference between `model` and `first` in the role with this index, as the mean over all assignments
    of the other roles; None if no task ran with both.

    `scores_by_models` has the scores of each assignment by task. Its keys are the models of all roles, in one order.
    """
    with_model: dict[str, list[float]] = {}
    with_first: dict[str, list[float]] = {}
    for models_of_roles, scores in scores_by_models.items():
        if models_of_roles[index] != model:
            continue
        # The counterpart has the first model in this role, and the same models in all other roles.
        counterpart = (*models_of_roles[:index], first, *models_of_roles[index + 1 :])
        if counterpart not in scores_by_models:
            continue
        scores_of_counterpart = scores_by_models[counterpart]
        for task in scores.keys() & scores_of_counterpart.keys():
            with_model.setdefault(task, []).append(scores[task])
            with_first.setdefault(task, []).append(scores_of_counterpart[task])
    return paired_difference(
        {task: fmean(values) for task, values in with_model.items()},
        {task: fmean(values) for task, values in with_first.items()},
    )
