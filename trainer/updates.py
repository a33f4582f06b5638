"""The updates of a step: each policy trains on the rows of its roles, and its new version goes to the sampler."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Literal, cast

import msgspec

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
"""Passes of so many tokens keep a GPU busy. Larger ones would gain less than it costs to move the engine's weights."""


TeacherOf = Callable[[str], Teacher | Literal["self"] | None]
"""The teacher of a policy, None for one that learns from rewards."""


async def update_policies(
    learner: Learner,
    rows: Mapping[str, Sequence[TrainRow]],
    scales: Mapping[str, float],
    teacher_of: TeacherOf = lambda policy: None,
) -> Updates:
    """Update policies on their rows, once their teachers have scored these.

    The learner trains one policy after the other; meanwhile a teacher scores the rows of the next. If updates fail, the
    first error is raised when all are done, because a thread cannot be left.
    """

    def update(policy: str) -> Mapping[str, float]:
        teacher = teacher_of(policy)
        if teacher is None:
            return learner.update(policy, rows[policy], lr_scale=scales[policy])
        scored = scored_rows(learner, teacher, policy, rows[policy])
        figures = learner.update(policy, scored, lr_scale=scales[policy])
        return {**figures, "unscored": float(len(rows[policy]) - len(scored))}

    work = (asyncio.to_thread(update, policy) for policy in rows)
    updates: dict[str, Mapping[str, float]] = {}
    for policy, figures in zip(rows, await asyncio.gather(*work, return_exceptions=True), strict=True):
        if isinstance(figures, BaseException):
            raise figures
        updates[policy] = figures
    return updates


def scored_rows(
    learner: Learner, teacher: Teacher | Literal["self"], policy: str, rows: Sequence[TrainRow]
) -> list[TrainRow]:
    """Add to rows the log-probabilities that a teacher gives their tokens. Rows that the teacher could not score are
    left out.

    The teacher reads the prompt with the hint (`TrainRow.hinted`), if there is one. A policy that is its own teacher
    (`"self"`) scores its rows with the weights from before the update.
    """
    read = [msgspec.structs.replace(row, prompt_ids=row.hinted or row.prompt_ids) for row in rows]
    scores = learner.logprobs(policy, read) if teacher == SELF else teacher.logprobs(read)
    scored = []
    for row, logprobs in zip(rows, scores, strict=True):
        if logprobs is not None:
            scored.append(msgspec.structs.replace(row, reference=tuple(logprobs.tolist()), hinted=()))
    return scored


@contextlib.asynccontextmanager
async def sampler_asleep(
    run: RolloutRun, rows: Mapping[str, Sequence[TrainRow]], report: StepReport
) -> AsyncIterator[None]:
    """An engine that shares its GPU with the learner sleeps meanwhile; it is awake again also after a failure.

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
    """Tokens of a pass that would train on these rows without loss of speed."""
    longest = most = 0
    for of_policy in rows.values():
        lengths = [len(row.prompt_ids) + len(row.response_ids) for row in of_policy]
        longest = max(longest, *lengths, 0)
        most = max(most, sum(lengths))
    return max(longest, min(most, ENOUGH_TOKENS))


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
