"""Does `cotune blame` name the role that is at fault? On workflows whose success is known exactly.

    python -m benchmarks.blame                     # all parts, three minutes on one core
    python -m benchmarks.blame --repetitions 4     # a reduced form
    python -m benchmarks.blame --parts coverage --repetitions 1000

The workflows are in `benchmarks.blame_workflows`: three to six roles, chains, a loop, a vote, roles that stand in for
each other, roles without influence. Roles err at natural rates of 2 to 15%, on tasks of different difficulty, and the
reference at 2% or less. The parts:

- `planted`: one role errs at rate 0.3, 0.6 or 1.0, drawn in each call or fixed per task. Every role in turn. Counted
  where the fault costs at least 10 points, and at least twice as much as any other role: a workflow may hide a fault.
- `healthy`: no role costs 10 points or more.
- `two`: two roles err, and each of them costs 10 points although the other one is mended.
- `obeys`: the reference makes the same errors.
- `coverage`: how often the 95% interval of a role's cost holds the exact value.
- `decisive`: how often the search for the call that lost an episode finds it, in episodes whose losses are known
  exactly (`benchmarks.blame_calls`); beside it, equally many forks at every call. The lines `none_decides` say how
  often it claims a call in an episode that loses less than 10 points at each of its calls.

Every analysis runs the rounds of the command and reads its verdict. Shares stand with the counts behind them. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from benchmarks.blame_calls import failed_episode, search_adaptively, search_equally
from benchmarks.blame_workflows import WORKFLOWS, Application, analyse, application
from cotune.reading.blame import LEAST_EFFECT
from cotune.trainer.blame.arms import ALL, Arm
from cotune.trainer.blame.decisive import LEAST_LOSS
from cotune.trainer.blame.estimates import role_effects

RUNS = 30
Line = dict[str, Any]
console = Console(stderr=True)


def planted(repetitions: int) -> list[Line]:
    """How often the guilty role is named, and how often another one."""
    lines = []
    for rate, fixed, tasks in itertools.product((0.3, 0.6, 1.0), (False, True), (5, 10, 20, 40)):
        if fixed and rate == 1:
            continue  # An error rate of 1 is the same on every task.
        rng = random.Random(f"planted {rate} {fixed} {tasks}")
        counts: Counter[str] = Counter()
        for name, (roles, _) in WORKFLOWS.items():
            for guilty, _ in itertools.product(roles, range(repetitions)):
                app = application(name, rng, faults={guilty: rate}, fixed=fixed)
                others = max(app.score(role) for role in roles if role != guilty)
                if app.score(guilty) < max(LEAST_EFFECT, 2 * others):
                    counts["hidden"] += 1
                    continue
                analysed = analyse(app, rng, tasks=tasks, runs=RUNS)
                effects = [
                    effect for effect in role_effects(analysed.outcomes, roles, 1.0) if effect.role in analysed.live
                ]
                verdict = analysed.verdict
                counts["analysed"] += 1
                counts["first"] += effects[0].role == guilty
                counts["named"] += verdict.kind == "named" and verdict.roles[0] == guilty
                counts["wrong"] += verdict.kind in ("named", "either") and guilty not in verdict.roles
        lines.append(_line("planted", counts, "first", "named", "wrong", rate=rate, fixed=fixed, tasks=tasks))
    return lines


def healthy(repetitions: int) -> list[Line]:
    """How often nobody is named in an application in which no role costs the least effect that matters."""

    def costs_little(app: Application) -> bool:
        return all(app.score(role) < LEAST_EFFECT for role in app.roles)

    return _verdicts("healthy", 10 * repetitions, lambda name, rng: application(name, rng), costs_little)


def obeys(repetitions: int) -> list[Line]:
    """The verdicts on a reference that makes the same errors."""

    def faulty(name: str, rng: random.Random) -> Application:
        return application(name, rng, faults={rng.choice(WORKFLOWS[name][0]): 0.6}, obeys=True)

    def fails(app: Application) -> bool:
        return sum(app.chance(task, ALL) for task in range(len(app.own))) < 0.7 * len(app.own)

    return _verdicts("obeys", 10 * repetitions, faulty, fails)


def _verdicts(
    part: str,
    repetitions: int,
    make: Callable[[str, random.Random], Application],
    counts_for: Callable[[Application], bool],
) -> list[Line]:
    """How often each verdict is reached, of the applications that count."""
    lines = []
    for tasks in (10, 20, 40):
        rng = random.Random(f"{part} {tasks}")
        counts: Counter[str] = Counter()
        for name, _ in itertools.product(WORKFLOWS, range(repetitions)):
            app = make(name, rng)
            if counts_for(app):
                counts["analysed"] += 1
                counts[analyse(app, rng, tasks=tasks, runs=RUNS).verdict.kind] += 1
        lines.append(_line(part, counts, "named", "either", "nobody", "reference", "undecided", tasks=tasks))
    return lines


def two(repetitions: int) -> list[Line]:
    """How often two faulty roles are both in the verdict, and how often at least one is.

    A fault is `masked` if it costs less than 10 points until the other one is mended. The command does not see it then:
    mending the role that it names, and running it again, may show it. `next` is how often the second analysis gives
    the other role the highest cost, of the analyses that named one role of the pair.
    """
    lines = []
    for rate, tasks in itertools.product((0.6, 1.0), (10, 20)):
        rng = random.Random(f"two {rate} {tasks}")
        counts: Counter[str] = Counter()
        for name, (roles, _) in WORKFLOWS.items():
            for pair, _ in itertools.product(itertools.combinations(roles, 2), range(repetitions)):
                app = application(name, rng, faults=dict.fromkeys(pair, rate))
                if not all(_costs_alone(app, pair, role) for role in pair):
                    counts["hidden"] += 1
                    continue
                named = set(pair) & set(analyse(app, rng, tasks=tasks, runs=RUNS).verdict.roles)
                masked = min(app.score(role) for role in pair) < LEAST_EFFECT
                counts["analysed"] += 1
                counts["one"] += len(named) > 0
                counts["both"] += len(named) == 2
                counts["masked"] += masked
                counts["both_unmasked"] += len(named) == 2 and not masked
                if len(named) == 1:
                    (other,) = set(pair) - named
                    again = analyse(app.mend(*named), rng, tasks=tasks, runs=RUNS)
                    effects = role_effects(again.outcomes, roles, 1.0)
                    counts["repeated"] += 1
                    counts["next"] += effects[0].role == other
        line = _line("two", counts, "both", "one", "masked", rate=rate, tasks=tasks)
        unmasked = counts["analysed"] - counts["masked"]
        line["both_of_unmasked"] = round(counts["both_unmasked"] / max(unmasked, 1), 4)
        line["next"] = f"{counts['next']} of {counts['repeated']}"
        lines.append(line)
    return lines


def _costs_alone(app: Application, pair: Sequence[str], role: str) -> bool:
    """Whether a role costs 10 points although the other one of the pair is mended."""
    (other,) = (role_name for role_name in pair if role_name != role)
    total = 0.0
    for task, (rates, reference) in enumerate(zip(app.own, app.reference, strict=True)):
        mended = {**rates, other: reference[other]}
        total += app.success({**mended, role: reference[role]}) - app.chance(task, Arm("only", other))
    return total / len(app.own) >= LEAST_EFFECT


def coverage(repetitions: int) -> list[Line]:
    """How often the interval of a role holds its exact cost, over workflows with and without a fault."""
    lines = []
    for tasks in (5, 20, 40):
        rng = random.Random(f"coverage {tasks}")
        cells: list[float] = []
        for name, rate in itertools.product(WORKFLOWS, (None, 0.6)):
            guilty = rng.choice(WORKFLOWS[name][0])
            # The tasks of an analysis are drawn from many, whose mean is the exact value.
            app = application(name, rng, faults={guilty: rate} if rate else None, tasks=1000)
            exact = {role: app.score(role) for role in app.roles}
            covered: Counter[str] = Counter()
            for _ in range(repetitions):
                outcomes = analyse(app, rng, tasks=tasks, runs=12, halve=False).outcomes
                for effect in role_effects(outcomes, app.roles, 1.0):
                    covered[effect.role] += effect.score.low <= exact[effect.role] <= effect.score.high
            cells += [covered[role] / repetitions for role in app.roles]
        lines.append(
            {
                "part": "coverage",
                "tasks": tasks,
                "cells": len(cells),
                "repetitions": repetitions,
                "mean": round(sum(cells) / len(cells), 4),
                "lowest": round(min(cells), 4),
            }
        )
        console.print(lines[-1])
    return lines


def decisive(repetitions: int) -> list[Line]:
    """How often the decisive call is found, by the largest loss of the episode and the rate of the faulty call."""
    lines = []
    for largest, rate in itertools.product((0.2, 0.4), (0.3, 0.6, 0.9)):
        rng = random.Random(f"decisive {largest} {rate}")
        counts: Counter[str] = Counter()
        adaptive_runs = 0.0
        while counts["analysed"] < 10 * repetitions:
            episode = failed_episode(rng, calls=rng.randrange(4, 13), rate=rate)
            if episode.largest < largest:
                continue
            adaptive = search_adaptively(episode, rng, RUNS)
            adaptive_runs += adaptive.runs
            counts["analysed"] += 1
            counts["right"] += episode.is_right(adaptive.call)
            counts["claimed"] += adaptive.claimed
            counts["right_claim"] += adaptive.claimed and episode.is_right(adaptive.call)
            # The search spends about half of its budget: the rest is for the forks that measure the loss.
            for times in (1, 2, 4):
                counts[f"equal_{times}"] += episode.is_right(search_equally(episode, rng, times * RUNS / 2))
        line = _line(
            "decisive", counts, "right", "claimed", "equal_1", "equal_2", "equal_4", largest=largest, rate=rate
        )
        line["right_when_claimed"] = round(counts["right_claim"] / max(counts["claimed"], 1), 4)
        line["runs"] = round(adaptive_runs / counts["analysed"], 1)
        lines.append(line)
    return lines + none_decides(repetitions)


def none_decides(repetitions: int) -> list[Line]:
    """How often a call is claimed in an episode in which every call loses less than decides an episode."""
    lines = []
    for rate in (0.9, 0.97):
        rng = random.Random(f"none decides {rate}")
        counts: Counter[str] = Counter()
        while counts["analysed"] < 10 * repetitions:
            episode = failed_episode(rng, calls=rng.randrange(4, 13), rate=rate)
            if episode.largest < LEAST_LOSS:
                counts["analysed"] += 1
                counts["claimed"] += search_adaptively(episode, rng, RUNS).claimed
        lines.append(_line("none_decides", counts, "claimed", rate=rate))
    return lines


def _line(part: str, counts: Counter[str], *shares: str, **settings: Any) -> Line:
    """The shares of the analysed applications, with their counts."""
    line: Line = {"part": part, **settings, "analysed": counts["analysed"]}
    if counts["hidden"]:
        line["hidden"] = counts["hidden"]
    for name in shares:
        line[name] = round(counts[name] / max(counts["analysed"], 1), 4)
        line[f"{name}_count"] = counts[name]
    console.print(line)
    return line


PARTS: dict[str, Callable[[int], list[Line]]] = {
    "planted": planted,
    "healthy": healthy,
    "two": two,
    "obeys": obeys,
    "coverage": coverage,
    "decisive": decisive,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="some of them (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=10, help="analyses per cell (default: %(default)s)")
    a = parser.parse_args()
    lines = [line for part in a.parts.split(",") for line in PARTS[part](a.repetitions)]
    print(json.dumps(lines))


if __name__ == "__main__":
    main()
