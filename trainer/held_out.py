"""Held-out tasks within a run: how often single samples of the newest policies succeed on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from cotune.errors import ConfigError
from cotune.json_values import plain
from cotune.recording.records import Task
from cotune.recording.rollout import EpisodeBatch
from cotune.tasks import load_tasks
from cotune.trainer.config.train import EvaluationConfig
from cotune.trainer.evaluation.run import summarise
from cotune.trainer.evaluation.sink import EvaluationSink
from cotune.trainer.reporting.step_report import StepReport
from cotune.trainer.rollout.episodes import run_episodes
from cotune.trainer.run import Run


def held_out_tasks(config: EvaluationConfig) -> list[Task]:
    """The tasks of `[evaluation]`; none where it is off. Raises ConfigError."""
    if not config.tasks:
        return []
    try:
        return load_tasks(config.tasks)[: config.limit]
    except ConfigError as error:
        raise ConfigError("evaluation.tasks", error.value, error.allowed, error.remedy) from None


def overlap(tasks: Sequence[Task], held_out: Sequence[Task]) -> Iterator[str]:
    """A sentence where tasks are not held out at all."""
    known = {msgspec.json.encode(task.input, enc_hook=plain) for task in tasks}
    count = sum(msgspec.json.encode(task.input, enc_hook=plain) in known for task in held_out)
    if count:
        yield f"{count} of {len(held_out)} held-out tasks are trained on too: success on them says little"


async def evaluate_held_out(run: Run, report: StepReport) -> dict[str, float]:
    """Run the held-out tasks once each after this step, where that is due: one sample per call, nothing is selected.

    Returns `success` and `reward` with the ends of their 95% intervals, as far as they are known, `episodes` and
    `failed`, and `ROLE/NAME` for each reward of a role's scorer; nothing where it is not due or the run is stopped. A
    failed episode is no success.
    """
    config = run.config
    step = run.state.steps + 1
    if not run.held_out or (step % config.evaluation.every and step != config.steps):
        return {}
    seen = EvaluationSink(run.store)
    batch = EpisodeBatch(tasks=run.held_out, sink=seen, phase="eval", training_step=run.state.steps)
    with report.phase("evaluate"):
        if await run.interruptible(run_episodes(run, batch, plan=None, stream="eval")) is None:
            return {}
    found = summarise("held-out", seen, 0.0, {})
    figures = {"episodes": float(found.episodes), "failed": float(sum(found.failed.values()))}
    for name, interval in (("success", found.success), ("reward", found.reward)):
        if interval is not None:
            figures[name] = interval.mean
            if interval.low is not None and interval.high is not None:
                figures |= {f"{name}_low": interval.low, f"{name}_high": interval.high}
    for role, own in found.roles.items():
        figures |= {f"{role}/{name}": value for name, value in own.rewards.items()}
    return figures
