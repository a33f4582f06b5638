"""The result of `cotune blame` as values, its verdict in a sentence, and the file that keeps it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from cotune.intervals import Interval
from cotune.records.structs import Episode
from cotune.storage.typed_json import read_if_typed
from cotune.tables import plural

REPORT = "blame_report.json"
"""The file with the result in the folder of an analysis, or of a search for prompts, which makes one."""
FORK = "blame-fork"
FRESH_FORK = "blame-fresh-fork"
"""Phases of forks: those that look for the decisive call of an episode, and those that measure its loss."""
RESCORED = "blame-rescored"
"""Phase of runs that repeat another one from its record to the end, so that its outcome is scored a second time."""
DECISIVE = "A decisive call loses 10 points or more and at least half of the largest loss. Another may lose as much."
"""The line below the decisive calls that a report shows."""
LEAST_EFFECT = 0.1
"""The least that a role must cost to be named, as a share of the span of outcomes. In simulations of 14 families of
workflows a healthy application then names nobody in 95 to 96% of cases; with 0.05 in 71 to 88%."""
LEAST_TASKS = 5
"""Minimum number of tasks. With fewer, the figures say nothing about other tasks."""
Kind = Literal["named", "either", "nobody", "reference", "undecided", "untested"]
"""Kinds of verdicts: see `Blame`."""


class RoleBlame(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of a role: how much better the outcome gets when a reference answers in its place.

    All figures are means over tasks, in units of the outcome.
    """

    role: str
    reference: str
    """The name of the reference in its place."""
    calls: float
    """Calls in a run of the application as it is."""
    score: Interval
    """Mean of `alone` and `last`: the cost of the role."""
    alone: Interval
    """The gain when only this role is swapped."""
    last: Interval
    """The loss when all roles but this one are swapped, against all."""
    seconds: float | None
    """Seconds that a run takes longer when only this role is swapped."""
    cost: float | None
    """Money that a run costs more then; None without prices."""
    runs: int
    """Runs on each task in which only this role was swapped."""


class ScoringNoise(msgspec.Struct, frozen=True, kw_only=True):
    """How much outcomes change when the same run, with the same answers, is scored a second time."""

    runs: int
    """Runs that were scored twice."""
    changed: int
    """Runs whose outcomes differ."""
    deviation: float
    """Standard deviation of a score, in units of the outcome."""
    share: float
    """Share of the variance of outcomes that is the scorer's."""


class CallEffect(msgspec.Struct, frozen=True, kw_only=True):
    """How much an episode loses at one call: how much more often it succeeds when it runs again from before the call
    than from after it. `forks` is the number of these runs."""

    step: int
    loss: Interval
    forks: int
    parallel: int = 1
    """Number of calls that ran at the same time, this one among them. They have one effect together."""


class LostEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """A failed episode, and the call that lost it."""

    episode: str
    task: str
    calls: int
    call: int | None
    """The decisive call by its step: it loses 10 points or more, and at least half of the largest loss of a call.
    Another call may lose as much. None if no call is named, for the reason in `why`."""
    parallel: Sequence[int] = ()
    """Steps of the calls that ran at the same time as the decisive one: they decide together."""
    why: str = ""
    role: str = ""
    """The role of the call, or of all calls that decide together, separated by commas."""
    loss: Interval | None = None
    """How much more often the episode succeeds when it runs again from before the call than from after it."""
    answer: str = ""
    """The answer at the call."""
    redraw: str = ""
    """The answer at the same place of the best fork."""
    redraw_call: str = ""
    """The id of the call with that answer."""
    forks: int = 0
    effects: Sequence[CallEffect] = ()
    """The effects of all calls with forks before and after them."""


class Blame(msgspec.Struct, frozen=True, kw_only=True):
    """Which role of an application loses the episodes.

    `verdict` is `named` (`at_fault` are the roles, the one that costs most first), `either` (one of `at_fault`, which
    cannot be told apart), `nobody`, `reference` (it does not mend the failures), `undecided` or `untested`.
    """

    workflow: str
    references: Mapping[str, str]
    """The names of the references, by role, "" for every other role."""
    removes: bool
    """Whether roles were removed, by fixed answers in their place, to see whether they earn it."""
    tasks: int
    runs: int
    calls: int
    cost: float | None
    outcome: Interval | None
    """The mean outcome of the application as it is."""
    swapped: Interval | None
    """The mean outcome with every role swapped."""
    span: float
    """The greatest outcome minus the least."""
    luck: Interval | None
    """Share of the failures that succeed at another try; None if no failure was run again."""
    scoring: ScoringNoise | None = None
    """None if no run was scored twice."""
    roles: Sequence[RoleBlame]
    all_roles: Sequence[str]
    """Every role that made a call."""
    verdict: Kind
    at_fault: Sequence[str] = ()
    more_tasks: int | None = None
    """About how many further tasks would decide, if the verdict is `undecided`."""
    episodes: Sequence[LostEpisode] = ()
    """Failed episodes whose decisive call was looked for."""
    left_out: Mapping[str, int] = {}
    """Runs that count nowhere, by the reason."""
    failures: int = 0
    """Runs of the application as it is that did not succeed."""
    failed: int = 0
    """Runs in which the application raised. They count as the lowest outcome."""
    notes: Sequence[str] = ()
    ended: str = ""
    """Why it ended before all its runs; empty if it did not."""
    path: str = ""
    """The folder with its records."""

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        return _removal_verdict(self) if self.removes else _swap_verdict(self)

    def to_json(self) -> dict[str, Any]:
        """All fields and the sentence, as JSON values."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        return {**values, "sentence": self.sentence}

    def points(self, value: float) -> float:
        """A difference of outcomes in points: hundredths of the span."""
        return 100 * value / self.span


def summed_outcome(episode: Episode, rewards: Mapping[str, float] | None) -> float | None:
    """The outcome of an episode: the sum of its `rewards`. None if it is not known: the episode has no reward, or did
    not end well."""
    return sum(rewards.values()) if episode.status == "ok" and rewards else None


def read_blame(folder: Path | None) -> Blame | None:
    """The result in a folder; None without one, and if it cannot be read."""
    return None if folder is None else read_if_typed(folder / REPORT, Blame)


def luck_sentence(blame: Blame) -> str:
    """A sentence about the share of failures that succeed when their task is run again."""
    share = blame.luck
    if share is None and blame.failures:
        return "No failure was run again."
    if share is None:
        return "No run of the application as it is failed."
    text = f"{share.mean:.0%} of the failures succeed at another try"
    if share.low is not None and share.high is not None:
        text += f" ({100 * share.low:.0f} to {100 * share.high:.0f})"
    return f"{text}; the rest fail again."


def scoring_sentence(blame: Blame) -> str:
    """A sentence about the share of the variance of outcomes that comes from the scorer.

    Empty if the scorer gave every run the same outcome when it scored the run again.
    """
    noise = blame.scoring
    if noise is None or not noise.changed:
        return ""
    return (
        f"Scoring noise: {noise.changed} of {plural(noise.runs, 'run')} got another outcome when scored again. "
        f"That is {noise.share:.0%} of the variance of outcomes."
    )


def loss_points(loss: Interval) -> str:
    """A loss in points: how many more of 100 runs succeed from before a call than from after it."""
    return _with_interval(loss, lambda value: _fixed(100 * value, 0))


def shown_points(blame: Blame, interval: Interval, *, signed: bool = False) -> str:
    """A difference in points with its interval, `31 (22 to 40)`."""
    return _with_interval(interval, lambda value: _fixed(blame.points(value), 0, signed=signed))


def noise_points(noise: ScoringNoise, blame: Blame) -> str:
    """The standard deviation of a score in points, `± 22`."""
    return f"± {_fixed(blame.points(noise.deviation), 0)}"


def shown_outcome(blame: Blame, outcome: float | Interval) -> str:
    """An outcome, with its interval if it has one: `0.50 (0.40 to 0.60)`. The last digit is about a hundredth of the
    span of outcomes."""
    decimals = min(max(2 - math.floor(math.log10(blame.span)), 0), 9) if blame.span > 0 else 2
    if isinstance(outcome, Interval):
        return _with_interval(outcome, lambda value: _fixed(value, decimals))
    return _fixed(outcome, decimals)


def shown_money(money: float, *, signed: bool = False) -> str:
    """An amount of money: two decimals, or two significant digits if it is small."""
    decimals = 2
    if 0 < abs(money) < 0.1:
        decimals = min(1 - math.floor(math.log10(abs(money))), 9)
    return _fixed(money, decimals, signed=signed)


def shown_seconds(seconds: float) -> str:
    """A difference in seconds, with its sign."""
    return _fixed(seconds, 1, signed=True)


def _with_interval(interval: Interval, show: Callable[[float], str]) -> str:
    """A figure, followed by its interval if it is known."""
    if interval.low is None or interval.high is None:
        return show(interval.mean)
    return f"{show(interval.mean)} ({show(interval.low)} to {show(interval.high)})"


def _fixed(value: float, decimals: int, *, signed: bool = False) -> str:
    """A number with `decimals` decimals and separated thousands."""
    # Adding 0 turns -0.0 into 0.0.
    rounded = round(value, decimals) + 0.0
    return f"{rounded:+,.{decimals}f}" if signed else f"{rounded:,.{decimals}f}"


def _swap_verdict(blame: Blame) -> str:
    """The verdict of runs in which a reference answered in place of roles, in words."""
    match blame.verdict:
        case "named":
            return _named_roles(blame)
        case "either":
            names = " or ".join(blame.at_fault)
            return f"Either {names} is at fault; these runs do not tell which. Mend one, then run this again."
        case "nobody":
            return f"Nobody is at fault: no role costs {100 * LEAST_EFFECT:.0f} points or more."
        case "reference":
            outcomes = ""
            if blame.swapped is not None and blame.outcome is not None:
                as_it_is = shown_outcome(blame, blame.outcome.mean)
                swapped = shown_outcome(blame, blame.swapped.mean)
                outcomes = f" ({as_it_is} as it is, {swapped} with all roles swapped)"
            return f"The reference does not help{outcomes}. Look at the prompts, the tasks or the scorer."
        case "undecided":
            return f"Undecided: {_what_would_decide(blame)}."
        case "untested":
            return "Which role is at fault is not known: nothing was swapped. Name a --reference."


def _named_roles(blame: Blame) -> str:
    """The sentences about the roles at fault, with the cost of each and of the next role."""
    roles = {role.role: role for role in blame.roles}
    first = roles[blame.at_fault[0]]
    parts = [f"{first.role} is at fault: it costs {shown_points(blame, first.score)} points"]
    for name in blame.at_fault[1:]:
        parts.append(f"so is {name}: {shown_points(blame, roles[name].score)} points")
    not_at_fault = [role for role in blame.roles if role.role not in blame.at_fault]
    if not_at_fault:
        next_role = max(not_at_fault, key=lambda role: role.score.mean)
        parts.append(f"the next one, {next_role.role}, costs {shown_points(blame, next_role.score)}")
    gain = shown_points(blame, first.alone)
    return f"{'; '.join(parts)}. Answering {first.role} with {first.reference} alone wins {gain} points."


def _what_would_decide(blame: Blame) -> str:
    """The end of the sentence "Undecided: ...": how many more tasks would show which role is at fault, or that none
    is."""
    if blame.more_tasks is None:
        least = f"{100 * LEAST_EFFECT:.0f} points"
        return f"the costliest role costs about {least}, the least that counts, so even many more tasks may not decide"
    tasks = plural(blame.more_tasks, "more task")
    n_tasks = blame.roles[0].score.n if blame.roles else LEAST_TASKS
    if n_tasks < LEAST_TASKS:
        return f"with fewer than {LEAST_TASKS} tasks no role is named; run {tasks}"
    return f"about {tasks} would decide"


def _removal_verdict(blame: Blame) -> str:
    """A sentence for each role: how the outcome changes if a fixed answer replaces the answers of the role."""
    sentences: list[str] = []
    for role in blame.roles:
        name = role.role
        # The change of the outcome if the reference, here a fixed answer, answers in place of this role alone.
        change = role.alone
        if change.low is None or change.high is None:
            sentences.append(f"Whether {name} earns its place is not known on fewer than {LEAST_TASKS} tasks.")
        elif change.high < 0:
            # Shown as a loss, so the signs change, and the upper bound becomes the lower one.
            loss = Interval(mean=-change.mean, low=-change.high, high=-change.low, n=change.n)
            points = shown_points(blame, loss)
            sentences.append(f"Without {name} the outcome loses {points} points: it earns its place.")
        elif change.low > 0:
            points = shown_points(blame, change)
            sentences.append(f"Without {name} the outcome gains {points} points: it does harm.")
        else:
            points = shown_points(blame, change, signed=True)
            sentences.append(f"Without {name} the outcome changes by {points} points: no effect is shown.")
    return " ".join(sentences) or "Not known: no run without these roles came to an end."
