"""The updates of a step: each policy is trained on the rows of its roles, and its new version is published."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Literal, cast

import msgspec
import numpy as np
import numpy.typing as npt

from cotune.algorithms.samples import TrainRow
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import SleepingSampler
from cotune.storage.token_figures import CandidateTokens, write_token_figures
from cotune.trainer.config.engine import engine_sleeps
from cotune.trainer.learner.protocol import SELF, Learner, Teacher
from cotune.trainer.publish import Probe, probe_prompts, prove_publish
from cotune.trainer.reporting.metrics import Updates, policies_that_moved
from cotune.trainer.run.precision import gap_remedy
from cotune.trainer.run.run import RolloutRun
from cotune.trainer.step_report import StepReport

ENOUGH_TOKENS = 16384
"""Passes of this number of tokens keep a GPU busy. Larger passes save less time than it takes to move the engine's
weights."""


TeacherOf = Callable[[str], Teacher | Literal["self"] | None]
"""A function that returns the teacher of a policy; None if the policy learns from rewards."""


async def update_policies(
    learner: Learner,
    rows: Mapping[str, Sequence[TrainRow]],
    scales: Mapping[str, float],
    teacher_of: TeacherOf = lambda policy: None,
) -> Updates:
    """Update policies on their rows, after their teachers have scored the rows. Returns the metrics of each update.

    The learner trains one policy after the other. Meanwhile teachers score the rows of the other policies. If updates
    fail, the first error is raised when all have ended, because a thread cannot be stopped.
    """

    def update(policy: str) -> Mapping[str, float]:
        teacher = teacher_of(policy)
        if teacher is None:
            return learner.update(policy, rows[policy], lr_scale=scales[policy])
        scored = scored_rows(learner, teacher, policy, rows[policy])
        metrics = learner.update(policy, scored, lr_scale=scales[policy])
        return {**metrics, "unscored": float(len(rows[policy]) - len(scored))}

    threads = (asyncio.to_thread(update, policy) for policy in rows)
    results = await asyncio.gather(*threads, return_exceptions=True)
    updates: dict[str, Mapping[str, float]] = {}
    for policy, result in zip(rows, results, strict=True):
        if isinstance(result, BaseException):
            raise result
        updates[policy] = result
    return updates


def scored_rows(
    learner: Learner, teacher: Teacher | Literal["self"], policy: str, rows: Sequence[TrainRow]
) -> list[TrainRow]:
    """Return rows with the log-probabilities that a teacher gives their tokens (`TrainRow.reference`). Rows that the
    teacher could not score are left out.

    The teacher reads the prompt with the hint (`TrainRow.hinted`), if there is one. A policy that is its own teacher
    (`"self"`) scores its rows with the weights from before the update.
    """
    rows_of_teacher = [msgspec.structs.replace(row, prompt_ids=row.hinted or row.prompt_ids) for row in rows]
    if teacher == SELF:
        logprobs_of_rows: Sequence[npt.NDArray[np.float32] | None] = learner.logprobs(policy, rows_of_teacher)
    else:
        logprobs_of_rows = teacher.logprobs(rows_of_teacher)
    scored: list[TrainRow] = []
    for row, logprobs in zip(rows, logprobs_of_rows, strict=True):
        if logprobs is not None:
            scored.append(msgspec.structs.replace(row, reference=tuple(logprobs.tolist()), hinted=()))
    return scored


@contextlib.asynccontextmanager
async def sampler_asleep(
    run: RolloutRun, rows: Mapping[str, Sequence[TrainRow]], report: StepReport
) -> AsyncIterator[None]:
    """Let an engine that shares its GPU with the learner sleep within the block. It is woken also after a failure.

    Its weights stay on the GPU if passes that are large enough for these rows fit next to them.
    """
    if not engine_sleeps(run.config):
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
    """Return the number of tokens of a pass that trains on these rows at full speed. It must hold the longest row, and
    need not hold more than all rows of a policy."""
    longest_row = 0
    most_of_policy = 0
    for rows_of_policy in rows.values():
        lengths = [len(row.prompt_ids) + len(row.response_ids) for row in rows_of_policy]
        longest_row = max(longest_row, *lengths, 0)
        most_of_policy = max(most_of_policy, sum(lengths))
    return max(longest_row, min(most_of_policy, ENOUGH_TOKENS))


def keep_figures(run: RolloutRun, rows: Mapping[str, Sequence[TrainRow]]) -> None:
    """Write the learner's figures for each token of the step into the run folder, for the viewer."""
    figures: dict[str, CandidateTokens] = {}
    for policy in rows:
        figures.update(run.learner.seen(policy))
    write_token_figures(run.folder.path, run.state.steps, figures)


async def publish(run: RolloutRun, rows: Mapping[str, Sequence[TrainRow]], updates: Updates) -> None:
    """Publish the next version of every policy that has moved."""
    for name in policies_that_moved(updates):
        probe = probe_prompts(row.prompt_ids for row in rows[name])
        await publish_version(run, name, run.next_version(name), probe=probe)


async def publish_version(run: RolloutRun, policy: str, version: int, *, probe: Sequence[Sequence[int]] = ()) -> None:
    """Publish the learner's present weights of a policy, prove that they are served, and retire the versions that no
    rollout uses any more. `probe` has the prompts of the proof, as token ids. Raises SyncError."""
    spec = run.state.policies.specs[policy]
    served = run.published.setdefault(policy, [])
    oldest_used = version - run.config.ahead  # a rollout that runs ahead may still ask for this version
    outdated = [proof for proof in served if proof.policy.version < oldest_used]
    still_used = [proof for proof in served if proof.policy.version >= oldest_used]
    weights = await asyncio.to_thread(run.learner.weights, policy)
    proof = await prove_publish(
        run.sampler,
        PolicyRef(policy, version),
        weights,
        spec.lora if spec.kind == "lora" else None,
        previous=served[-1] if served else None,
        probe=Probe(
            prompts=probe,
            logprobs=functools.partial(run.learner.logprobs, policy),
            bound=run.config.probe_bound,
            remedy=gap_remedy(run.config),
        ),
        retire=[old.policy for old in outdated],
    )
    run.published[policy] = [*still_used, proof]
    run.state.versions[policy] = version
