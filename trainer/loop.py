"""The training loop. One step of it is the algorithm: roll out, group, update each policy, publish, commit."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, cast

import msgspec

from cotune.adapters.publish import Proof, prove_publish
from cotune.collect import Collected, collect, failure_reward
from cotune.errors import GroupError, LearnerLost, RunError
from cotune.policies import PolicySpec
from cotune.prepare import Prepared, prepare, train_rows
from cotune.records import Episode, PolicyRef
from cotune.sampler import SamplingParams, SleepingSampler
from cotune.samples import TrainRow
from cotune.trainer.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from cotune.trainer.metrics import Clock, StepMetrics, outcome_means, role_metrics
from cotune.trainer.progress import Progress
from cotune.trainer.rollout import rollout
from cotune.trainer.rollout_wire import Answering
from cotune.trainer.rollouts import Rollouts
from cotune.trainer.run import Run, restore
from cotune.trainer.schedule import lr_scale, tasks_of_step

NOTHING_TO_LEARN = ("zero_variance", "zero_advantage", "mean_out_of_range")
"""Reasons to leave out sound groups: a step in which nothing else is left makes no update, and goes on."""


async def train_steps(run: Run, progress: Progress) -> None:
    """Training from the run's next step to its last.

    for each step:
        episodes = run the workflow on the step's tasks; every call is K candidates, scored, one goes on
                   (mode async: the next steps' episodes go on meanwhile, at most `max_staleness` steps ahead)
        samples  = candidates of finished episodes; what cannot be trained on is counted by reason
        groups   = samples with one prompt; advantages inside each
        for each policy: update on the rows of its roles; publish the new version; prove that it arrived
        commit (as the next step begins): checkpoint with the ledger of consumed groups
    """
    config = run.config
    await counted(run)
    rollouts = Rollouts(lambda step: roll_out(run, step, progress), steps=config.steps, ahead=config.ahead)
    async with rollouts:
        while run.step < config.steps and not run.stopping:
            try:
                await one_step(run, rollouts, progress)
            except LearnerLost as error:
                await rollouts.cancel()
                await go_back(run, error, progress)
        await commit(run, last=True)


async def one_step(run: Run, rollouts: Rollouts, progress: Progress) -> None:
    """Save the steps before, get the episodes of the next one, train on them; nothing more when the run is stopped."""
    clock = Clock()
    with clock("checkpoint"):
        await commit(run)
    with clock("rollout"):
        episodes = await run.interruptible(rollouts.of(run.step))
    if episodes is None:
        return
    await train_step(run, episodes, clock, progress)
    if run.step == run.config.steps:
        await commit(run, last=True)


async def go_back(run: Run, error: LearnerLost, progress: Progress) -> None:
    """Restart lost learners from the last checkpoint. Raises `error` when they have been restarted too often."""
    run.learner_restarts += 1
    limit = run.config.cluster.learner_restarts
    if run.learner_restarts > limit:
        raise LearnerLost(
            f"{error.cause} It was the {run.learner_restarts}th time; cluster.learner_restarts is {limit}.",
            f"See the cause, then go on with: cotune train --resume {run.folder.path}",
        ) from error
    progress.say(f"{error.cause} Restarting it from the last checkpoint ({run.learner_restarts} of {limit}).")
    await asyncio.to_thread(run.learner.restart)
    saved = load_checkpoint(run.folder.checkpoints)
    if saved is None:
        raise error
    await restore(run, *saved)


async def train_step(run: Run, episodes: Sequence[Episode], clock: Clock, progress: Progress) -> None:
    """Group the episodes of the run's next step, update the policies, publish them, and report."""
    config = run.config
    with clock("group"):
        collected = collect(
            run.store,
            episodes,
            plan=run.plan.kind,
            roles=run.trained_roles,
            versions=run.versions,
            max_lag=config.ahead,
            on_failure=failure_reward(config.on_failure),
        )
        prepared = prepare(collected.samples, run.recipe, run.state, consumed=run.consumed)
        rows = by_policy(run, train_rows(prepared, collected, run.store))
    left_out = Counter(collected.left_out) + Counter(prepared.left_out)
    staleness = lags(rows, run.versions)
    scale = lr_scale(config.schedule, run.step, config.steps)
    async with asleep(run, clock):
        with clock("update"):
            updates = await update(run, rows, scale, left_out)
    with clock("publish"):
        await publish(run, rows)
    run.state = prepared.state
    counters = await counted(run)
    metrics = step_metrics(
        run, episodes, collected, prepared, rows, updates, left_out, staleness, counters, scale, clock
    )
    run.latest = metrics.roles
    run.ledger.update({group.id: run.step for group in prepared.groups})
    run.consumed.update(run.ledger)
    run.folder.append_metrics(msgspec.to_builtins(metrics))
    run.step += 1
    progress.step(metrics)


async def roll_out(run: Run, step: int, progress: Progress) -> list[Episode]:
    """All episodes of a step; those that a run before an interruption brought to a good end are not run again.

    When this is cancelled, finished episodes stay recorded for a resumed run. Raises SamplerError when the sampler is
    gone and RunError when records were lost: the step is not trained on, as it lacks episodes that it need not lack.
    """
    config = run.config
    tasks = tasks_of_step(run.tasks, step, config.tasks_per_step, config.seed)
    recorded = run.store.episodes(phase="train", training_step=step)
    done = [episode for episode in recorded if episode.status == "ok"]
    answering = Answering(
        policies=run.served(),
        plan=run.plan,
        attribution=run.recipe.attribution,
        defaults=SamplingParams(max_tokens=config.sampling.max_tokens, timeout=config.sampling.timeout),
        override={"temperature": config.sampling.temperature, "top_p": 1.0, "top_k": 0},
        provider_roles=tuple(run.provider_roles),
        seed=config.seed,
    )
    progress.rollout(step, len(tasks) * run.plan.episodes_per_task)
    how: dict[str, Any] = {
        "sink": run.store,
        "phase": "train",
        "training_step": step,
        "rollouts": run.plan.episodes_per_task,
        "concurrency": config.concurrency,
        "timeout": config.episode_timeout,
        "done": done,
        "on_episode": progress.episode,
    }
    if run.workers is None:
        responder = answering.responder(run.sampler, run.chat, run.workflow)
        episodes = await rollout(run.workflow, tasks, responder=responder, **how)
        errors: Mapping[str, int] = responder.scorer_errors
    else:
        episodes = await run.workers.rollout(tasks, answering=answering, **how)
        errors = run.workers.scorer_errors
    run.store.flush()
    progress.scorer_errors(errors)
    if run.store.lost:
        raise RunError(
            f"{run.store.lost} records could not be stored, so step {step + 1} is not trained on.",
            f"See the log; free some space, then go on with: cotune train --resume {run.folder.path}",
        )
    await run.sampler.info()
    return episodes


async def counted(run: Run) -> dict[str, int]:
    """What the sampler and the rollout workers have counted since the last step."""
    now = dict((await run.sampler.info()).counters)
    now |= {f"workers.{name}": count for name, count in (run.workers.counters if run.workers else {}).items()}
    news = {name: count - run.counted.get(name, 0) for name, count in now.items()}
    run.counted = now
    return {name: count for name, count in news.items() if count}


def by_policy(run: Run, rows: Mapping[str, Sequence[TrainRow]]) -> dict[str, list[TrainRow]]:
    """Rows of each trained policy: those of all the roles that it plays."""
    found: dict[str, list[TrainRow]] = {}
    for role, its_rows in rows.items():
        found.setdefault(run.policies.of(role).name, []).extend(its_rows)
    return {name: its_rows for name, its_rows in found.items() if its_rows}


async def update(
    run: Run, rows: Mapping[str, Sequence[TrainRow]], scale: float, left_out: Mapping[str, int]
) -> dict[str, Mapping[str, Any]]:
    """Update every policy that has rows. Raises GroupError when there are none and not even a group to learn
    nothing from."""
    if not rows and not any(left_out.get(reason) for reason in NOTHING_TO_LEARN):
        counts = ", ".join(f"{reason}: {count}" for reason, count in sorted(left_out.items())) or "no calls at all"
        raise GroupError(
            f"Step {run.step} has no usable sample ({counts}).", f"Look at the episodes: cotune show {run.folder.path}."
        )
    work = (asyncio.to_thread(run.learner.update, name, rows[name], lr_scale=scale) for name in rows)
    found = await asyncio.gather(*work, return_exceptions=True)
    for error in found:
        if isinstance(error, BaseException):
            raise error
    return dict(zip(rows, found, strict=True))


@contextlib.asynccontextmanager
async def asleep(run: Run, clock: Clock) -> AsyncIterator[None]:
    """An engine that shares its GPU with the learner sleeps meanwhile; it is awake again also after a failure."""
    if not run.config.cluster.colocate:
        yield
        return
    sampler = cast(SleepingSampler, run.sampler)
    with clock("sleep"):
        await sampler.sleep()
    try:
        yield
    finally:
        with clock("wake"):
            await sampler.wake()


async def publish(run: Run, rows: Mapping[str, Sequence[TrainRow]]) -> None:
    """Publish the next version of every updated policy, with proof; versions that no rollout uses any more are
    retired."""
    for name, its_rows in rows.items():
        new = PolicyRef(name, run.versions.get(name, 0) + 1)
        probe = list({row.prompt_ids: None for row in its_rows[:64]})[:4]
        live = [*run.live.get(name, ()), new]
        outdated, run.live[name] = live[: -1 - run.config.ahead], live[-1 - run.config.ahead :]
        run.proofs[name] = await published(run, run.policies.specs[name], new, probe, run.proofs.get(name), outdated)
        run.versions[name] = new.version


def lags(rows: Mapping[str, Sequence[TrainRow]], versions: Mapping[str, int]) -> dict[str, int]:
    """Rows by the number of versions that their sampler was behind the policy that trains on them."""
    counts = Counter(versions.get(name, 0) - row.version for name, its_rows in rows.items() for row in its_rows)
    return {str(lag): counts[lag] for lag in sorted(counts)}


async def published(
    run: Run,
    spec: PolicySpec,
    ref: PolicyRef,
    probe: Sequence[Sequence[int]],
    previous: Proof | None,
    retire: Sequence[PolicyRef] = (),
) -> Proof:
    """Publish the learner's present weights of one policy under `ref` and prove that the sampler serves them."""
    weights = await asyncio.to_thread(run.learner.weights, spec.name)
    return await prove_publish(
        run.sampler,
        ref,
        weights,
        spec.lora if spec.kind == "lora" else None,
        previous=previous,
        probe=probe,
        trainer_logprobs=lambda its_rows: run.learner.logprobs(spec.name, its_rows),
        bound=run.config.probe_bound,
        retire=retire,
    )


async def commit(run: Run, *, last: bool = False) -> None:
    """Write a checkpoint when one is due, then mark its groups as consumed."""
    if run.step == run.committed or (run.step % run.config.checkpoint_every and not last):
        return
    checkpoint = Checkpoint(
        steps=run.step,
        versions=dict(run.versions),
        policies=run.policies,
        ledger=dict(run.ledger),
        state=run.state,
        metrics=run.latest,
    )
    folder, keep = run.folder.checkpoints, run.config.keep_checkpoints
    try:
        await asyncio.to_thread(save_checkpoint, folder, checkpoint, run.learner, keep=keep)
    except OSError as error:
        raise RunError(
            f"The checkpoint after {run.step} steps cannot be written: {error}.",
            f"Free some space, then go on with: cotune train --resume {run.folder.path}",
        ) from error
    for step in sorted(set(run.ledger.values())):
        run.store.consume([group for group, at in run.ledger.items() if at == step], step)
    run.ledger.clear()
    run.committed = run.step


def step_metrics(
    run: Run,
    episodes: Sequence[Episode],
    collected: Collected,
    prepared: Prepared,
    rows: Mapping[str, Sequence[TrainRow]],
    updates: Mapping[str, Mapping[str, Any]],
    left_out: Mapping[str, int],
    staleness: Mapping[str, int],
    counters: Mapping[str, int],
    scale: float,
    clock: Clock,
) -> StepMetrics:
    """Everything a step reports."""
    tokens = sum(len(c.token_ids) for call in collected.calls.values() for c in call.candidates)
    policies = {name: {k: float(v) for k, v in figures.items() if "/" not in k} for name, figures in updates.items()}
    for name, proof in run.proofs.items():
        if name in policies:
            policies[name] |= {"version": run.versions[name], "norm": proof.norm, "norm_moved": proof.norm_moved}
            policies[name] |= {"probe_gap_mean": proof.probe_gap_mean, "probe_gap_max": proof.probe_gap_max}
    return StepMetrics(
        step=run.step,
        episodes=len(episodes),
        failed=sum(episode.status != "ok" for episode in episodes),
        calls=sum(episode.calls for episode in episodes),
        candidates=sum(len(call.candidates) for call in collected.calls.values()),
        groups=len(prepared.groups),
        rows=sum(map(len, rows.values())),
        outcome=outcome_means(episodes, run.store.rewards(episode.id for episode in episodes)),
        roles=role_metrics(prepared, collected, rows, updates),
        policies=policies,
        left_out=dict(left_out),
        staleness=dict(staleness),
        counters=dict(counters),
        lr_scale=scale,
        seconds=dict(clock.seconds),
        tokens_per_s=tokens / max(sum(clock.seconds.values()), 1e-9),
        updated=bool(rows),
        notes=tuple(prepared.warnings),
    )
