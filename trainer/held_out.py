"""Held-out tasks within a run: how often single samples of the newest policies succeed on them."""

from __future__ import annotations

from cotune.recording.rollout import EpisodeBatch
from cotune.trainer.evaluation.run import summarise
from cotune.trainer.evaluation.sink import EvaluationSink
from cotune.trainer.reporting.step_report import StepReport
from cotune.trainer.rollout.episodes import run_episodes
from cotune.trainer.run import Run


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
