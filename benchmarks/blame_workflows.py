"""Workflows whose success is known exactly, for the estimators of `cotune blame`.

A workflow gives the probability that it succeeds from the error rate of each of its roles. Tasks differ in difficulty.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cotune.trainer.blame.arms import ALL, OWN, Arm, all_but, arms_of_round, better_half, only
from cotune.trainer.blame.estimates import Outcomes, Verdict, decide, role_effects

Rates = Mapping[str, float]
REFERENCE_RATE = 0.02
DIFFICULTY = 0.5
"""Standard deviation of the difficulty of tasks, and of a role on a task, in logits of the error rate."""


def chain(rates: Rates) -> float:
    """Every role must be right."""
    return math.prod(1 - rate for rate in rates.values())


def mended(rates: Rates) -> float:
    """A worker, whose error a checker finds half of the time; then the worker tries once more. A writer ends it."""
    error = rates["worker"]
    noticed = 0.5 * (1 - rates["checker"])
    right = 1 - error + error * noticed * (1 - error)
    return right * (1 - rates["writer"])


def loop(rates: Rates) -> float:
    """A designer, then a coder and a tester until the tester accepts, at most four times. A bad design doubles the
    coder's errors."""
    total = 0.0
    for design, share in ((1.0, 1 - rates["designer"]), (3.0, rates["designer"])):
        wrong = min(1.0, design * rates["coder"])
        accepts_right, accepts_wrong = 1 - rates["tester"], rates["tester"]
        reaches, right = 1.0, 0.0
        for _ in range(4):
            right += reaches * (1 - wrong) * accepts_right
            reaches *= (1 - wrong) * (1 - accepts_right) + wrong * (1 - accepts_wrong)
        total += share * right
    return total


def vote(rates: Rates) -> float:
    """Three solvers, and a judge that takes the majority of their answers."""
    a, b, c = (1 - rates[role] for role in ("a", "b", "c"))
    majority = a * b * c + a * b * (1 - c) + a * (1 - b) * c + (1 - a) * b * c
    return majority * (1 - rates["judge"])


def backup(rates: Rates) -> float:
    """A parser, then two roles; one of the two has to be right."""
    return (1 - rates["parser"]) * (1 - rates["first"] * rates["second"])


def idle(rates: Rates) -> float:
    """A greeter and a critic that change nothing, together with a planner and an editor."""
    return (1 - rates["planner"]) * (1 - rates["editor"])


WORKFLOWS: Mapping[str, tuple[tuple[str, ...], Callable[[Rates], float]]] = {
    "chain of three": (("r0", "r1", "r2"), chain),
    "chain of six": (("r0", "r1", "r2", "r3", "r4", "r5"), chain),
    "checker": (("worker", "checker", "writer"), mended),
    "loop": (("designer", "coder", "tester"), loop),
    "vote": (("a", "b", "c", "judge"), vote),
    "backup": (("parser", "first", "second"), backup),
    "idle": (("greeter", "planner", "critic", "editor"), idle),
}


@dataclass
class Application:
    """A workflow with the error rates of its roles, on tasks that differ."""

    roles: tuple[str, ...]
    success: Callable[[Rates], float]
    own: list[dict[str, float]]
    """By task, the error rate of each role."""
    reference: list[dict[str, float]]

    def chance(self, task: int, arm: Arm) -> float:
        """The exact probability that a run succeeds."""
        own, reference = self.own[task], self.reference[task]
        return self.success({role: reference[role] if arm.swaps(role) else own[role] for role in self.roles})

    def mend(self, *roles: str) -> Application:
        """The same application, whose `roles` err as seldom as the reference."""
        own = []
        for rates, reference in zip(self.own, self.reference, strict=True):
            own.append({**rates, **{role: reference[role] for role in roles}})
        return Application(self.roles, self.success, own, self.reference)

    def score(self, role: str) -> float:
        """The exact score of a role: the mean over all tasks."""
        total = 0.0
        for task in range(len(self.own)):
            alone = self.chance(task, only(role, self.roles)) - self.chance(task, OWN)
            last = self.chance(task, ALL) - self.chance(task, all_but(role, self.roles))
            total += (alone + last) / 2
        return total / len(self.own)


def application(
    name: str,
    rng: random.Random,
    *,
    faults: Rates | None = None,
    fixed: bool = False,
    tasks: int = 200,
    obeys: bool = False,
) -> Application:
    """An application with natural error rates of 2 to 15%, and `faults`: higher rates of some roles.

    With `fixed` a role with a fault always errs on this share of the tasks, and at its natural rate on the others. With
    `obeys` the reference makes the errors of the application, as a model that follows the same faulty prompt.
    """
    faults = faults or {}
    roles, success = WORKFLOWS[name]
    natural = {role: rng.uniform(0.02, 0.15) for role in roles}
    own, reference = [], []
    for _ in range(tasks):
        difficulty = rng.gauss(0, DIFFICULTY)
        own_rates, reference_rates = {}, {}
        for role in roles:
            shift = difficulty + rng.gauss(0, DIFFICULTY)
            if fixed and role in faults:
                own_rates[role] = 1.0 if rng.random() < faults[role] else _shifted(natural[role], shift)
            else:
                own_rates[role] = _shifted(faults.get(role, natural[role]), shift)
            better = min(own_rates[role], _shifted(REFERENCE_RATE, shift))
            reference_rates[role] = own_rates[role] if obeys else better
        own.append(own_rates)
        reference.append(reference_rates)
    return Application(roles, success, own, reference)


def _shifted(rate: float, shift: float) -> float:
    return 1.0 if rate >= 1 else 1 / (1 + math.exp(-(math.log(rate / (1 - rate)) + shift)))


@dataclass
class Analysed:
    """The outcomes of an analysis, and the roles on which its last round was spent."""

    outcomes: Outcomes
    roles: Sequence[str]
    live: Sequence[str]

    @property
    def verdict(self) -> Verdict:
        return decide(self.outcomes, self.roles, self.live)


def analyse(app: Application, rng: random.Random, *, tasks: int, runs: int, halve: bool = True) -> Analysed:
    """Run the rounds of `cotune blame` on an application: `runs` runs of each of so many tasks, drawn by chance."""
    chosen = rng.sample(range(len(app.own)), tasks)

    def outcome(arm: Arm, task: int, number: int) -> float:
        return float(rng.random() < app.chance(task, arm))

    return run_rounds(app.roles, chosen, runs, outcome, halve=halve)


def run_rounds(
    roles: Sequence[str],
    tasks: Sequence[int],
    runs: int,
    outcome: Callable[[Arm, int, int], float],
    *,
    halve: bool = True,
) -> Analysed:
    """Run the rounds of `cotune blame`, up to `runs` runs of each task. `outcome` runs a task in an arm, for the first
    time (0) or once more. With `halve`, only the better half of the roles goes on after every second round."""
    outcomes, live = Outcomes(), list(roles)
    used, number = 0, 0
    while True:
        arms = arms_of_round(live, roles)
        used += len(arms)
        if number and used > runs:
            return Analysed(outcomes, roles, live)
        for arm in arms:
            for task in tasks:
                outcomes.add(arm, str(task), outcome(arm, task, number))
        number += 1
        if halve and number % 2 == 0:
            scores = {effect.role: effect.score.mean for effect in role_effects(outcomes, roles, 1.0)}
            live = better_half(live, scores)
