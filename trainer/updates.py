"""The updates of a step: which policy trains on which rows, and how its new version gets to the sampler."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, cast

from cotune.algorithms.samples import TrainRow
from cotune.policies import PolicySpec
from cotune.recording.records import PolicyRef
from cotune.sampling.protocol import SleepingSampler
from cotune.trainer.metrics import Clock
from cotune.trainer.publish import Proof, prove_publish
from cotune.trainer.run import Run

Updates = Mapping[str, Mapping[str, float]]
"""What the learner says of each policy that it updated."""


def by_policy(run: Run, rows: Mapping[str, Sequence[TrainRow]]) -> dict[str, list[TrainRow]]:
    """Rows of each trained policy: those of all the roles that it plays."""
    found: dict[str, list[TrainRow]] = {}
    for role, its_rows in rows.items():
        found.setdefault(run.policies.of(role).name, []).extend(its_rows)
    return {name: its_rows for name, its_rows in found.items() if its_rows}


async def update(run: Run, rows: Mapping[str, Sequence[TrainRow]], scale: float) -> Updates:
    """Update every policy that has rows."""
    work = (asyncio.to_thread(run.learner.update, name, rows[name], lr_scale=scale) for name in rows)
    found: list[Any] = await asyncio.gather(*work, return_exceptions=True)
    for error in found:
        if isinstance(error, BaseException):
            raise error
    return dict(zip(rows, found, strict=True))


def moved(updates: Updates) -> list[str]:
    """The policies whose weights an update has changed: not those that had no gradient in any of its steps."""
    return [
        name for name, figures in updates.items() if figures["steps"] > figures["skipped_steps"] + figures["idle_steps"]
    ]


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
    """Publish the next version of every policy in `rows`, with proof; versions that no rollout uses any more are
    retired."""
    for name, its_rows in rows.items():
        new = PolicyRef(name, run.versions.get(name, 0) + 1)
        probe = list({row.prompt_ids: None for row in its_rows[:64]})[:4]
        live = [*run.live.get(name, ()), new]
        outdated, run.live[name] = live[: -1 - run.config.ahead], live[-1 - run.config.ahead :]
        run.proofs[name] = await published(run, run.policies.specs[name], new, probe, run.proofs.get(name), outdated)
        run.versions[name] = new.version


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
