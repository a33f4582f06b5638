"""The updates of a step: each policy trains on the rows of its roles, and its new version goes to the sampler."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import cast

from cotune.algorithms.samples import TrainRow
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import SleepingSampler
from cotune.storage.token_figures import write_token_figures
from cotune.trainer.learner.protocol import Learner
from cotune.trainer.publish import Probe, probe_prompts, prove_publish
from cotune.trainer.reporting.metrics import Updates, moved
from cotune.trainer.reporting.step_report import StepReport
from cotune.trainer.run.precision import gap_remedy
from cotune.trainer.run.run import RolloutRun

ENOUGH_TOKENS = 16384
"""Passes of so many tokens keep a GPU busy. Larger ones would gain less than it costs to move the engine's weights."""


async def update_policies(
    learner: Learner, rows: Mapping[str, Sequence[TrainRow]], scales: Mapping[str, float]
) -> Updates:
    """Update policies on their rows.

    The learner trains one after the other; meanwhile a teacher scores the rows of the next. Raises what the first of
    them did, when the others are done too: a thread cannot be left.
    """
    work = (asyncio.to_thread(learner.update, name, rows[name], lr_scale=scales[name]) for name in rows)
    updates: dict[str, Mapping[str, float]] = {}
    for name, figures in zip(rows, await asyncio.gather(*work, return_exceptions=True), strict=True):
        if isinstance(figures, BaseException):
            raise figures
        updates[name] = figures
    return updates


@contextlib.asynccontextmanager
async def sampler_asleep(
    run: RolloutRun, rows: Mapping[str, Sequence[TrainRow]], report: StepReport
) -> AsyncIterator[None]:
    """An engine that shares its GPU with the learner sleeps meanwhile; it is awake again also after a failure.

    Its weights stay on the GPU if passes that are large enough for these rows fit next to them.
    """
    if not run.config.engine_sleeps:
        yield
        return
    sampler = cast(SleepingSampler, run.sampler)
    try:
        with report.phase("sleep"):
            await sampler.sleep(keep_weights=True)
            if not await asyncio.to_thread(run.learner.has_room, tokens_wanted(rows)):
                await sampler.sleep(keep_weights=False)
        yield
    finally:
        with report.phase("wake"):
            await sampler.wake()


def tokens_wanted(rows: Mapping[str, Sequence[TrainRow]]) -> int:
    """Tokens of a pass that would train on these rows without loss of speed."""
    longest = most = 0
    for of_policy in rows.values():
        lengths = [len(row.prompt_ids) + len(row.response_ids) for row in of_policy]
        longest, most = max(longest, *lengths, 0), max(most, sum(lengths))
    return max(longest, min(most, ENOUGH_TOKENS))


def keep_figures(run: RolloutRun, rows: Mapping[str, Sequence[TrainRow]]) -> None:
    """Write what the learner saw of each token of the step into the run folder, for the viewer."""
    found = {id: seen for policy in rows for id, seen in run.learner.seen(policy).items()}
    write_token_figures(run.folder.path, run.state.steps, found)


async def publish(run: RolloutRun, rows: Mapping[str, Sequence[TrainRow]], updates: Updates) -> None:
    """Publish the next version of every policy that has moved."""
    for name in moved(updates):
        probe = probe_prompts(row.prompt_ids for row in rows[name])
        await publish_version(run, name, run.next_version(name), probe=probe)


async def publish_version(run: RolloutRun, policy: str, version: int, *, probe: Sequence[Sequence[int]] = ()) -> None:
    """Publish the learner's present weights of a policy, prove that they are served, and retire the versions that no
    rollout uses any more. `probe` are prompts as token ids. Raises SyncError."""
    spec = run.state.policies.specs[policy]
    served = run.published.setdefault(policy, [])
    lora = spec.lora if spec.kind == "lora" else None
    oldest = version - run.config.ahead  # rollouts that run ahead may still ask for this one
    outdated = [proof for proof in served if proof.policy.version < oldest]
    weights = await asyncio.to_thread(run.learner.weights, policy)
    proof = await prove_publish(
        run.sampler,
        PolicyRef(policy, version),
        weights,
        lora,
        previous=served[-1] if served else None,
        probe=Probe(
            probe, lambda rows: run.learner.logprobs(policy, rows), run.config.probe_bound, gap_remedy(run.config)
        ),
        retire=[old.policy for old in outdated],
    )
    run.published[policy] = [*(old for old in served if old not in outdated), proof]
    run.state.versions[policy] = version
