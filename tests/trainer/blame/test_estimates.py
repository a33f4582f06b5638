"""The estimators of `cotune blame`, against values that are known exactly."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.blame_workflows import WORKFLOWS, analyse, application
from cotune.reading.blame import LEAST_EFFECT
from cotune.trainer.blame.arms import ALL, OWN, Arm, arm_of, arms_of_round, better_half
from cotune.trainer.blame.estimates import (
    Outcomes,
    OwnRuns,
    Span,
    decide,
    estimate,
    luck,
    nameable_effect,
    role_effects,
)

ROLES = ("planner", "writer", "critic")


@given(st.sampled_from(["own", "all", "only", "but"]), st.text(max_size=12))
def test_an_arm_is_read_back_from_its_phase(kind: str, role: str) -> None:
    arm = Arm(kind, role) if kind in ("only", "but") and role else Arm(kind)  # type: ignore[arg-type]
    assert arm_of(arm.phase) == arm
    assert arm_of("eval-base") is None


def test_arms_swap_the_roles_that_they_name() -> None:
    swapped = {arm: [role for role in ROLES if arm.swaps(role)] for arm in arms_of_round(["writer"], ROLES)}
    assert swapped == {
        OWN: [],
        ALL: ["planner", "writer", "critic"],
        Arm("only", "writer"): ["writer"],
        Arm("but", "writer"): ["planner", "critic"],
    }


def test_arms_that_swap_the_same_roles_are_one() -> None:
    assert arms_of_round(["a"], ["a"]) == [OWN, ALL]
    assert arms_of_round(["a", "b"], ["a", "b"]) == [OWN, ALL, Arm("only", "a"), Arm("only", "b")]
    assert len(arms_of_round(ROLES, ROLES)) == 8


def test_the_better_half_goes_on_and_never_fewer_than_two() -> None:
    scores = {"a": 0.1, "b": 0.4, "c": 0.2, "d": 0.0, "e": 0.3}
    assert better_half(list(scores), scores) == ["b", "e", "c"]
    assert better_half(["b", "e", "c"], scores) == ["b", "e"]
    assert better_half(["b", "e"], scores) == ["b", "e"]


def test_an_estimate_follows_its_formula() -> None:
    # By hand: mean 0.25, SS = 0.25, variance = (3 * 0.04 + 0.25) / 6; t(0.95, 6) = 1.94318, t(0.975, 6) = 2.44691.
    found = estimate([0.0, 0.5, 0.0, 0.5])
    error = ((0.12 + 0.25) / 6 / 4) ** 0.5
    assert found.mean == 0.25
    assert found.least == pytest.approx(0.25 - 1.94318 * error, abs=1e-5)
    assert found.high == pytest.approx(0.25 + 2.44691 * error, abs=1e-5)


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=40), st.floats(0.01, 1000))
def test_an_estimate_scales_with_its_outcomes(values: list[float], scale: float) -> None:
    plain, scaled = estimate(values), estimate([scale * value for value in values], scale)
    for one, other in zip(plain[:6], scaled[:6], strict=True):
        assert other == pytest.approx(scale * one, rel=1e-6, abs=1e-9 * scale)
    assert plain.low <= plain.least <= plain.mean <= plain.most <= plain.high


def test_few_tasks_have_no_interval_for_other_tasks() -> None:
    assert estimate([0.5] * 4).interval.low is None
    assert estimate([0.5] * 5).interval.low is not None


def outcomes_of(success: dict[frozenset[str], float], tasks: int = 10, roles: tuple[str, ...] = ROLES) -> Outcomes:
    """Outcomes of every arm on so many tasks, by the set of roles that are swapped; 0 for a set without any."""
    outcomes = Outcomes()
    for arm in arms_of_round(roles, roles):
        swapped = frozenset(role for role in roles if arm.swaps(role))
        for task in range(tasks):
            outcomes.add(arm, str(task), success.get(swapped, 0.0))
    return outcomes


EVERY = frozenset(ROLES)


def test_a_role_that_alone_is_at_fault_is_named() -> None:
    mended = dict.fromkeys([EVERY, frozenset({"planner"}), EVERY - {"writer"}, EVERY - {"critic"}], 1.0)
    verdict = decide(outcomes_of(mended), ROLES, ROLES)
    assert (verdict.kind, verdict.roles) == ("named", ("planner",))


def test_two_certain_faults_are_both_named_although_mending_one_changes_nothing() -> None:
    # Only when both the planner and the writer are swapped does the application succeed.
    outcomes = outcomes_of({EVERY: 1.0, EVERY - {"critic"}: 1.0}, tasks=20)
    planner, writer = role_effects(outcomes, ROLES, 1.0)[:2]
    assert planner.alone.mean == writer.alone.mean == 0
    assert planner.last.mean == writer.last.mean == 1
    verdict = decide(outcomes, ROLES, ROLES)
    assert (verdict.kind, set(verdict.roles)) == ("named", {"planner", "writer"})


def test_roles_that_stand_in_for_each_other_are_not_told_apart() -> None:
    helps = [EVERY, frozenset({"planner"}), frozenset({"writer"}), *(EVERY - {role} for role in ROLES)]
    outcomes = outcomes_of(dict.fromkeys(helps, 1.0), tasks=20)
    verdict = decide(outcomes, ROLES, ROLES)
    assert (verdict.kind, set(verdict.roles)) == ("either", {"planner", "writer"})


def test_a_role_that_helps_more_alone_is_told_apart_from_one_that_helps_less() -> None:
    # Mending the planner alone is enough on every task, mending the writer on every second one.
    outcomes = outcomes_of(dict.fromkeys([EVERY, *(EVERY - {role} for role in ROLES)], 1.0), tasks=20)
    for task in range(20):
        outcomes.add(Arm("only", "planner"), str(task), 2.0)
        outcomes.add(Arm("only", "writer"), str(task), float(task % 2))
    assert outcomes.span() == Span(0.0, 2.0)
    verdict = decide(outcomes, ROLES, ROLES)
    assert (verdict.kind, verdict.roles[0]) == ("named", "planner")


def test_a_reference_that_changes_nothing_does_not_help() -> None:
    assert decide(outcomes_of({}, tasks=20), ROLES, ROLES).kind == "reference"


def test_an_application_that_succeeds_has_nobody_at_fault() -> None:
    outcomes = Outcomes()
    for arm in arms_of_round(ROLES, ROLES):
        for task in range(40):
            outcomes.add(arm, str(task), 1.0)
    assert decide(outcomes, ROLES, ROLES).kind == "nobody"


def test_four_tasks_name_nobody() -> None:
    mended = dict.fromkeys([EVERY, frozenset({"planner"}), EVERY - {"writer"}, EVERY - {"critic"}], 1.0)
    verdict = decide(outcomes_of(mended, tasks=4), ROLES, ROLES)
    assert (verdict.kind, verdict.more_tasks) == ("undecided", 1)


def test_a_second_fault_is_named_by_what_it_costs_once_all_others_are_mended() -> None:
    # The planner always fails, and the writer on every fifth task: 20 points of `last`, but no `alone`.
    outcomes = Outcomes()
    for arm in arms_of_round(ROLES, ROLES):
        for task in range(100):
            writer_is_right = arm.swaps("writer") or task % 5 > 0
            outcomes.add(arm, str(task), float(arm.swaps("planner") and writer_is_right))
    writer = role_effects(outcomes, ROLES, 1.0)[1]
    assert (writer.role, writer.alone.mean) == ("writer", 0.0)
    assert writer.score.least < LEAST_EFFECT < writer.last.least
    verdict = decide(outcomes, ROLES, ROLES)
    assert (verdict.kind, verdict.roles) == ("named", ("planner", "writer"))


def test_a_role_that_was_dropped_is_not_named() -> None:
    mended = dict.fromkeys([EVERY, frozenset({"planner"}), EVERY - {"writer"}, EVERY - {"critic"}], 1.0)
    assert decide(outcomes_of(mended), ROLES, ("writer", "critic")).roles == ()


def test_tasks_without_one_of_the_arms_do_not_count() -> None:
    outcomes = outcomes_of({EVERY: 1.0, frozenset({"planner"}): 1.0}, tasks=6)
    outcomes.add(Arm("only", "planner"), "further", 1.0)
    assert role_effects(outcomes, ROLES, 1.0)[0].score.tasks == 6


def test_one_role_is_compared_with_itself_swapped() -> None:
    outcomes = outcomes_of({frozenset({"solver"}): 1.0}, tasks=6, roles=("solver",))
    verdict = decide(outcomes, ("solver",), ("solver",))
    assert (verdict.kind, verdict.roles) == ("named", ("solver",))


def test_undecided_says_about_how_many_tasks_would_do() -> None:
    outcomes = Outcomes()
    for task in range(8):
        outcomes.add(OWN, str(task), 0.0 if task < 2 else 1.0)
        outcomes.add(ALL, str(task), 1.0)
    verdict = decide(outcomes, ("solver",), ("solver",))
    # The gain is 2 of 8. Its bound reaches 0.1 at about (1.645 * 0.4 / 0.15)^2 tasks.
    assert verdict.kind == "undecided"
    assert verdict.more_tasks is not None and 5 <= verdict.more_tasks <= 20


@given(st.lists(st.floats(-1e6, 1e6, allow_nan=False), min_size=1, max_size=20))
def test_the_span_holds_all_outcomes(values: list[float]) -> None:
    outcomes = Outcomes()
    for number, value in enumerate(values):
        outcomes.add(OWN, str(number), value)
    span = outcomes.span()
    assert span.low <= min(values) and max(values) <= span.high and span.size > 0


def test_outcomes_from_0_to_1_keep_that_span() -> None:
    outcomes = Outcomes()
    outcomes.add(OWN, "t", 0.4)
    assert outcomes.span() == Span(0.0, 1.0)


def test_luck_is_the_share_of_failures_that_succeed_at_another_try() -> None:
    # Two failures of one task with one success among two further tries each, and one failure that always fails.
    found = luck([OwnRuns([False, True, False]), OwnRuns([False, False]), OwnRuns([True, True])])
    assert found is not None
    assert found.mean == pytest.approx((2 * 0.5 + 2 * 0.0) / 4)
    assert found.n == 2
    assert luck([OwnRuns([True, True]), OwnRuns([False])]) is None


def test_after_a_selection_by_the_first_run_only_that_one_is_the_failure() -> None:
    found = luck([OwnRuns([False, True, True, False]), OwnRuns([True, False])], first_failed=True)
    assert found is not None and found.mean == pytest.approx(2 / 3)


@given(st.lists(st.lists(st.booleans(), max_size=6), max_size=10), st.booleans())
def test_luck_is_a_share_inside_its_interval(tasks: list[list[bool]], first_failed: bool) -> None:
    found = luck([OwnRuns(runs) for runs in tasks], first_failed=first_failed)
    if found is not None:
        assert found.low is not None and found.high is not None
        assert -1e-9 <= found.low <= found.mean + 1e-9 and found.mean - 1e-9 <= found.high <= 1 + 1e-9


def test_a_larger_budget_names_smaller_faults() -> None:
    effects = [nameable_effect(tasks, runs) for tasks, runs in ((5, 10), (10, 10), (20, 10), (20, 30))]
    assert effects == sorted(effects, key=lambda effect: -(effect or 0.0)) and len(set(effects)) == 4
    assert nameable_effect(4, 30) is None


@pytest.mark.parametrize("tasks", [5, 20, 40])
def test_intervals_cover_the_known_score(tasks: int) -> None:
    """A small form of `benchmarks/blame.py --coverage`: 40 applications, three roles each."""
    rng = random.Random(tasks)
    covered = total = 0
    for _ in range(40):
        app = application("checker", rng, faults={"worker": 0.4}, tasks=400)
        truth = {role: app.score(role) for role in app.roles}
        outcomes = analyse(app, rng, tasks=tasks, runs=8, halve=False).outcomes
        for effect in role_effects(outcomes, app.roles, 1.0):
            covered += effect.score.low <= truth[effect.role] <= effect.score.high
            total += 1
    assert total == 120
    assert covered / total >= 0.89


@pytest.mark.parametrize("name", ["chain of three", "loop", "checker"])
def test_a_planted_fault_is_named(name: str) -> None:
    rng = random.Random(1)
    right = wrong = tried = 0
    while tried < 8:
        guilty = rng.choice(WORKFLOWS[name][0])
        app = application(name, rng, faults={guilty: 0.6})
        others = [app.score(role) for role in app.roles if role != guilty]
        if app.score(guilty) < max(0.1, 2 * max(others)):
            continue  # The workflow hides the fault.
        tried += 1
        verdict = analyse(app, rng, tasks=20, runs=30).verdict
        right += verdict.kind == "named" and verdict.roles[0] == guilty
        wrong += verdict.kind in ("named", "either") and guilty not in verdict.roles
    assert wrong == 0
    assert right >= 6


def test_a_healthy_application_names_nobody() -> None:
    rng = random.Random(2)
    named = 0
    for _ in range(20):
        app = application("chain of three", rng)
        if max(app.score(role) for role in app.roles) < 0.1:
            named += analyse(app, rng, tasks=20, runs=30).verdict.kind in ("named", "either")
    assert named <= 2


def test_a_reference_that_obeys_the_faulty_prompt_is_said_not_to_help() -> None:
    rng = random.Random(3)
    kinds = []
    for _ in range(10):
        app = application("chain of three", rng, faults={"r1": 0.6}, obeys=True)
        kinds.append(analyse(app, rng, tasks=20, runs=30).verdict.kind)
    assert kinds.count("reference") >= 8 and "named" not in kinds


@pytest.mark.parametrize(("outcome", "lost"), [(5.0, 0.0), (-2.0, 2.0)])
def test_outcomes_that_are_all_equal_are_successes_if_positive(outcome: float, lost: float) -> None:
    outcomes = Outcomes()
    outcomes.add(OWN, "t", outcome)
    assert outcomes.span().high - outcome == lost
    assert outcomes.span().size > 0
