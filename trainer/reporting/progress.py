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
"""The number of different causes of failed episodes that a run shows."""
SILENCE = 60.0
"""If no bar can be shown, a line shows the progress after this many seconds without a line."""

FAULT_COUNTERS = (
    "died", "errors", "faulty", "garbage", "late_rewards_refused", "lost", "out_of_memory", "published_by_files",
    "restarts", "retried", "timeouts", "unhealthy",
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
        self._live: Live | None = None
        if self.console.is_terminal:
            self._live = Live(self._bars, console=self.console, refresh_per_second=4)
        self._shown: set[str] = set()  # lines and errors that are shown only once
        self._causes: set[str] = set()  # causes of failed episodes that were shown
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
        """Print the present phase whenever nothing was printed for `SILENCE` seconds. Runs in a separate thread."""
        is_over = False
        while not is_over:
            if time.monotonic() - self._last_line >= SILENCE:
                self.say(self.activity.text)
            is_over = self._over.wait(max(self._last_line + SILENCE - time.monotonic(), 0.01))

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
        """Count an episode of the rollout that has ended. If it has failed, show its error, up to `CAUSES` different
        errors in a run."""
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
        """Show each error of a scorer once, with the number of candidates that it has left without a reward."""
        for text, count in errors.items():
            if text not in self._shown:
                self._shown.add(text)
                self.say(f"scorer failed on {plural(count, 'candidate')}, not trained on: {text}")

    def step(self, metrics: StepMetrics) -> None:
        """Show the figures of a finished step, and the time to the end of the run. A terminal gets bars and a table, a
        log one line."""
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
    """Show a bar over episodes, or without a terminal a line every `SILENCE` seconds. Yields a function that counts one
    more episode, or `count` more."""
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
    """Return the figures of a step in one line."""
    # Rewards, what was learned from, and the time.
    seconds = ", ".join(f"{phase} {spent:.1f}s" for phase, spent in metrics.seconds.items() if spent >= 0.05)
    learned_from = loss_parts(metrics) or [f"groups {metrics.groups}"]
    parts = [*reward_parts(metrics), *learned_from, f"rows {metrics.rows}", seconds]
    shares = shares_of(metrics.roles)
    if shares:
        parts.append("gradient: " + "  ".join(f"{role} {share:.0%}" for role, share in shares.items()))

    # The rollout: forks, refill, faults and counters.
    if metrics.replay:
        figures = metrics.replay
        parts.append(
            f"{figures['forks']} forks, {figures['branches']} branches, {figures['diverged']} diverged, "
            f"{figures['repeated']} calls from the record"
        )
    if metrics.refill.get("tasks"):
        parts.append(_refill_text(metrics))
    if metrics.failed:
        parts.append(f"failed episodes {metrics.failed} of {metrics.episodes}")
    if metrics.staleness.keys() - {"0"}:
        lags = ", ".join(f"{lag}: {count}" for lag, count in metrics.staleness.items())
        parts.append(f"rows by staleness {lags}")
    faults = [f"{name} {count}" for name, count in metrics.counters.items() if name in FAULT_COUNTERS]
    parts.append(", ".join(faults))
    parts.append(_counters_text(metrics.counters, "judge", JUDGE_COUNTERS))
    parts.append(_counters_text(metrics.counters, "teacher", TEACHER_COUNTERS))

    # Candidates and policies that were not trained.
    if metrics.left_out:
        left_out = ", ".join(f"{reason} {count}" for reason, count in metrics.left_out.items())
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
    role_texts: list[str] = []
    for role, figures in metrics.roles.items():
        if figures.get("refill_drawn"):
            role_texts.append(f"{role} {figures['refill_kept']:.0f} of {figures['refill_drawn']:.0f} groups differ")
    if role_texts:
        text += f" ({', '.join(role_texts)})"
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
    """Return the rewards of a step as parts of its line: single samples on held-out tasks, all candidates by role, and
    the outcomes of the step's episodes."""
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
    """Return success and rewards of an evaluation on held-out tasks, with their intervals and numbers of tasks. Returns
    an empty text without an evaluation."""
    episodes = figures.get("episodes", 0.0)
    failed = figures.get("failed", 0.0)
    parts: list[str] = []
    for name, title in (("success", "success"), ("reward", "reward"), ("outcome", PLAIN)):
        if name not in figures:
            continue
        if name == "outcome" and figures[name] == figures.get("success"):
            continue  # an outcome that is a bool is the success, which is shown already
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


def _counters_text(counters: Mapping[str, float], owner: str, names: Iterable[str]) -> str:
    """Return these counters of the `owner` ("judge" or "teacher") as a part of the line; an empty text if it has
    none."""
    texts: list[str] = []
    for name in names:
        count = counters.get(f"{owner}.{name}")
        if count is None:
            continue
        if name == "cost":
            texts.append(f"{name} {count:.6f}")
        else:
            texts.append(f"{name.replace('_', ' ')} {count:.0f}")
    return f"{owner}: {', '.join(texts)}" if texts else ""


def _interval_text(figures: Mapping[str, float], name: str) -> str:
    """Return the interval of a figure in brackets; an empty text without one."""
    ends = [figures[end] for end in (f"{name}_low", f"{name}_high") if end in figures]
    return f" [{', '.join(f'{end:.3f}' for end in ends)}]" if ends else ""
