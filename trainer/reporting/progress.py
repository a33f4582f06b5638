"""The progress of a run: a live table on a terminal, one line per step elsewhere."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from cotune.reading.gradient_shares import shares_of
from cotune.reading.headline import PLAIN
from cotune.records.structs import Episode
from cotune.storage.metrics_file import StepMetrics
from cotune.tables import first_line, plural
from cotune.terminal import print_line, terminal
from cotune.trainer.reporting.activity import Activity
from cotune.trainer.reporting.columns import role_table
from cotune.trainer.reporting.loggers import Loggers

CAUSES = 5
"""Number of different causes of failed episodes that are shown in a run."""
SILENCE = 60.0
"""Seconds without a line after which a line shows the progress, if no bar can be shown."""

FAULT_COUNTERS = (
    "died", "errors", "faulty", "garbage", "late_rewards_refused", "lost", "out_of_memory", "restarts", "retried",
    "timeouts", "unhealthy",
)  # fmt: skip
"""Counters that a step shows: faults of engines, workers and stores from which the run has recovered."""
JUDGE_COUNTERS = ("requests", "cached", "cost", "asked_again", "dropped", "over_budget", "uncounted")
"""Counters of judges that a step shows."""
TEACHER_COUNTERS = ("retried", "timeouts", "unscored")
"""Counters of a teacher that a step shows."""


class Progress:
    """Shows steps, the episodes of the present step, the latest figures by role, and the time left."""

    def __init__(self, steps: int, console: Console | None = None, folder: Path | None = None) -> None:
        """`folder` is the run folder; it gets the file with the phase of the run."""
        self.loggers: Loggers | None = None
        """Trackers, which also get every episode and step."""
        self.console = console or terminal()
        self._bars = Bars(
            TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            console=self.console,
        )  # fmt: skip
        self._steps = self._bars.add_task("steps", total=steps)
        self._episodes = self._bars.add_task("episodes", total=None)
        self._live = Live(self._bars, console=self.console, refresh_per_second=4) if self.console.is_terminal else None
        self._shown: set[str] = set()
        self._causes: set[str] = set()
        self._total = steps
        self.activity = Activity(steps, folder)
        self._last_line = time.monotonic()
        self._over = threading.Event()

    def __enter__(self) -> Progress:
        if self._live:
            self._live.start()
        else:
            threading.Thread(target=self._break_silence, name="cotune-progress", daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        if self._live:
            self._live.stop()

    def _break_silence(self) -> None:
        """Print the present phase whenever nothing was printed for `SILENCE` seconds; runs in a separate thread."""
        while not self._over.wait(max(self._last_line + SILENCE - time.monotonic(), 0.01)):
            if time.monotonic() - self._last_line >= SILENCE:
                self.say(self.activity.text)

    def say(self, text: str) -> None:
        """Print a line."""
        self._last_line = time.monotonic()
        print_line(self.console, text)

    def say_once(self, text: str) -> None:
        """Print a line, unless it was printed before."""
        if text not in self._shown:
            self._shown.add(text)
            self.say(text)

    def begin(self, step: int) -> None:
        """Start the clock at the first step of this process."""
        self._bars.update(self._steps, completed=step)
        self.activity.begin(step)

    def rollout(self, episodes: int) -> None:
        """Begin a rollout with this number of episodes."""
        self._bars.reset(self._episodes, total=episodes, description="episodes")
        self.activity.count("rollout", episodes)

    def further(self, episodes: int) -> None:
        """Add episodes to the rollout."""
        self._bars.update(self._episodes, total=(self._bars.tasks[self._episodes].total or 0) + episodes)
        self.activity.further("rollout", episodes)

    def evaluation(self, episodes: int) -> None:
        """Begin an evaluation with this number of episodes."""
        self._bars.reset(self._episodes, total=episodes, description="held-out")
        self.activity.count("evaluate", episodes)

    def evaluated(self, episode: Episode) -> None:
        """Count an episode of an evaluation that has ended."""
        self._bars.advance(self._episodes)
        self.activity.advance("evaluate")

    def episode(self, episode: Episode) -> None:
        """Count an ended episode for the progress line. Show the error of a failed one, up to `CAUSES` different
        errors.
        """
        self._bars.advance(self._episodes)
        self.activity.advance("rollout")
        if self.loggers is not None:
            self.loggers.episode(episode)
        if episode.status != "error":
            return
        cause = first_line(episode.error)
        if cause not in self._causes and len(self._causes) < CAUSES:
            self.say(f"an episode of task {episode.task.id} failed: {cause}")
            if len(self._causes) == CAUSES - 1:
                self.say("further causes are not shown here, but by cotune show")
            self._causes.add(cause)

    def scorer_errors(self, errors: Mapping[str, int]) -> None:
        """Show each distinct error of a scorer once, with the number of candidates."""
        for text, count in errors.items():
            if text not in self._shown:
                self._shown.add(text)
                self.say(f"scorer failed on {plural(count, 'candidate')}, not trained on: {text}")

    def step(self, metrics: StepMetrics) -> None:
        """Show the figures of a finished step, and how long the run will still take. A terminal gets bars and a table,
        a log one line.
        """
        if self.loggers is not None:
            self.loggers.step(metrics)
        self._bars.update(self._steps, completed=metrics.step + 1)
        seconds_left = self.activity.step(metrics.step + 1)
        for note in metrics.notes:
            self.say_once(note)
        if self._live:
            parts = [*(reward_parts(metrics) or loss_parts(metrics)), f"{sum(metrics.seconds.values()):.1f} s"]
            self.say(f"step {metrics.step + 1}/{self._total}  {'  |  '.join(parts)}")
            self._live.update(Group(self._bars, role_table(metrics), summary(metrics)))
            return
        minutes, seconds = divmod(round(seconds_left), 60)
        self.say(f"step {metrics.step + 1}/{self._total}  {summary(metrics)}  |  {minutes}:{seconds:02} to go")


@contextlib.contextmanager
def episode_bar(console: Console, total: int | None, name: str = "episodes") -> Iterator[Callable[..., None]]:
    """Show a bar over episodes, or without a terminal a line every `SILENCE` seconds. Yields the function that advances
    it, by one or by `count`."""
    done = 0
    last_line = time.monotonic()
    with Bars(console=console, disable=not console.is_terminal) as bars:
        bar = bars.add_task(name, total=total)

        def advance(_: object = None, count: int = 1) -> None:
            nonlocal done, last_line
            done += count
            bars.advance(bar, count)
            if not console.is_terminal and time.monotonic() - last_line >= SILENCE:
                last_line = time.monotonic()
                console.print(f"{name}: {done}{'' if total is None else f' of {total}'}", highlight=False)

        yield advance


def summary(metrics: StepMetrics) -> str:
    """Return the step in one line."""
    seconds = ", ".join(f"{phase} {spent:.1f}s" for phase, spent in metrics.seconds.items() if spent >= 0.05)
    left_out = ", ".join(f"{reason} {count}" for reason, count in metrics.left_out.items())
    learned = loss_parts(metrics) or [f"groups {metrics.groups}"]
    parts = [*reward_parts(metrics), *learned, f"rows {metrics.rows}", seconds]
    if shares := shares_of(metrics.roles):
        parts.append("gradient: " + "  ".join(f"{role} {share:.0%}" for role, share in shares.items()))
    if metrics.replay:
        parts.append(
            "{forks} forks, {branches} branches, {diverged} diverged, {repeated} calls from the record".format(
                **metrics.replay
            )
        )
    if metrics.refill.get("tasks"):
        parts.append(_refill_text(metrics))
    if metrics.failed:
        parts.append(f"failed episodes {metrics.failed} of {metrics.episodes}")
    if metrics.staleness.keys() - {"0"}:
        lags = ", ".join(f"{lag}: {count}" for lag, count in metrics.staleness.items())
        parts.append(f"rows by staleness {lags}")
    if faults := {name: count for name, count in metrics.counters.items() if name in FAULT_COUNTERS}:
        parts.append(", ".join(f"{name} {count}" for name, count in faults.items()))
    parts += _counter_parts(metrics.counters, "judge", JUDGE_COUNTERS)
    parts += _counter_parts(metrics.counters, "teacher", TEACHER_COUNTERS)
    if left_out:
        parts.append(f"left out: {left_out}")
    stayed = ", ".join(f"{policy} ({why})" for policy, why in metrics.stayed.items())
    if not metrics.updated:
        parts.append(f"no update: nothing to learn from in this step: {stayed}")
    elif stayed:
        parts.append(f"not updated: {stayed}")
    return "  |  ".join(part for part in parts if part)


def _refill_text(metrics: StepMetrics) -> str:
    """Describe the tasks that a refill has drawn, and how many of each role's groups have different rewards."""
    refill = metrics.refill
    text = f"refill: {plural(refill['tasks'], 'task')}"
    if refill["late_tasks"]:
        text += f", {plural(refill['late_tasks'], 'task')} late ({refill['late']} episodes)"
    by_role: list[str] = []
    for role, figures in metrics.roles.items():
        if figures.get("refill_drawn"):
            by_role.append(f"{role} {figures['refill_kept']:.0f} of {figures['refill_drawn']:.0f} groups differ")
    if by_role:
        text += f" ({', '.join(by_role)})"
    return text


def loss_parts(metrics: StepMetrics) -> list[str]:
    """Return the losses of a step that learns from records, by role."""
    parts: list[str] = []
    for name, title in (("loss", "loss"), ("accuracy", "accuracy"), ("held_out_loss", "held-out loss")):
        by_role = {role: figures[name] for role, figures in metrics.roles.items() if name in figures}
        if by_role:
            parts.append(f"{title}: " + "  ".join(f"{role} {value:.4f}" for role, value in by_role.items()))
    return parts


def reward_parts(metrics: StepMetrics) -> list[str]:
    """Return the step's rewards: single samples on held-out tasks, all candidates by role, and the
    outcomes of the step's episodes."""
    parts: list[str] = []
    if text := held_out_text(metrics.held_out):
        parts.append(f"held-out, single samples: {text}")
    rewards = {role: figures["reward"] for role, figures in metrics.roles.items() if "reward" in figures}
    if rewards:
        parts.append("all candidates: " + "  ".join(f"{role} {value:.3f}" for role, value in rewards.items()))
    if metrics.outcome:
        outcome = "  ".join(f"{name} {value:.3f}" for name, value in metrics.outcome.items())
        parts.append(f"{metrics.path}: {outcome}")
    return parts


def held_out_text(figures: Mapping[str, float]) -> str:
    """Return success and rewards of an evaluation on held-out tasks, with their intervals and counts; an empty text
    without any."""
    episodes = figures.get("episodes", 0.0)
    failed = figures.get("failed", 0.0)
    parts: list[str] = []
    for name, title in (("success", "success"), ("reward", "reward"), ("outcome", PLAIN)):
        # An outcome that is a bool is the success, so it is shown once.
        if name not in figures or (name == "outcome" and figures[name] == figures.get("success")):
            continue
        tasks = figures.get(f"{name}_n", episodes)
        part = f"{title} {figures[name]:.3f}{_interval_text(figures, name)} on {tasks:.0f}"
        if f"base_{name}" in figures:
            part += f" (base {figures[f'base_{name}']:.3f})"
        parts.append(part)
    for name, reward in figures.items():
        kind, _, role = name.partition("/")
        if kind == "against_untrained" and role:
            parts.append(f"{role} against the untrained model {reward:.3f}")
    if parts and failed:
        parts.append(f"({failed:.0f} of {episodes:.0f} failed)")
    return "  ".join(parts)


def _counter_parts(counters: Mapping[str, float], who: str, names: Iterable[str]) -> list[str]:
    """Return the counters of a judge or a teacher as one part of the line; none if there are no counters."""
    texts: list[str] = []
    for name in names:
        count = counters.get(f"{who}.{name}")
        if count is not None:
            texts.append(f"{name} {count:.6f}" if name == "cost" else f"{name.replace('_', ' ')} {count:.0f}")
    return [f"{who}: {', '.join(texts)}"] if texts else []


def _interval_text(figures: Mapping[str, float], name: str) -> str:
    ends = [figures[end] for end in (f"{name}_low", f"{name}_high") if end in figures]
    return f" [{', '.join(f'{end:.3f}' for end in ends)}]" if ends else ""
