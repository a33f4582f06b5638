"""Publishing with proof: the weights have changed, have arrived, and the sampler really samples from them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from cotune.algorithms.samples import TrainRow
from cotune.errors import GapError, SyncError
from cotune.records.policies import LoraSpec
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import Sampler, SamplingParams, Weights, fingerprint, publish_verified

PROBE = SamplingParams(temperature=1.0, max_tokens=2, seed=0)
"""Sampling of the probe: not truncated, so that the trainer's log-probabilities are of the same distribution. The first
token comes from the pass over the prompt, the second from a decode step. Further steps would cost more than further
candidates."""
LONGER = msgspec.structs.replace(PROBE, max_tokens=16, seed=1)
"""A longer probe, which decides if the first one is above the bound: in bfloat16 a few unlikely tokens may cause most
of a gap."""
PROBE_CANDIDATES = 16
PROBE_PROMPTS = 4
PROBE_PROMPT = 32
"""Most tokens of a prompt of the probe. Any text shows whether weights differ, and nothing is cached for a new version:
the probe takes longer than the rest of a publication."""


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """Evidence that a version is served.

    `weights_norm` is the L2 norm of all weights, `norm_moved` its change since the previous version (0 for the first).
    The probe gap is |log pi_sampler - log pi_train| in nats over `probe_tokens` sampled tokens.
    """

    policy: PolicyRef
    fingerprint: str
    norm: float
    norm_moved: float = 0.0
    probe_gap_mean: float = 0.0
    probe_gap_max: float = 0.0
    probe_tokens: int = 0


@dataclass(frozen=True)
class Probe:
    """Prompts (token ids) that a version is sampled with, at least `PROBE_CANDIDATES` times in all, the trainer's
    log-probabilities of rows, and the largest mean gap between both, in nats.

    `remedy` says how to reduce a gap from rounding. It is empty if sampler and trainer both compute in float32.
    """

    prompts: Sequence[Sequence[int]]
    logprobs: Callable[[Sequence[TrainRow]], Sequence[npt.NDArray[Any]]]
    bound: float = 1e-2
    remedy: str = ""


def probe_prompts(prompts: Iterable[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return a few different beginnings of prompts."""
    return list(dict.fromkeys(tuple(ids[:PROBE_PROMPT]) for ids in prompts))[:PROBE_PROMPTS]


def weights_norm(weights: Weights) -> float:
    """L2 norm over all tensors, summed in double precision."""
    return math.sqrt(sum(float(np.square(array, dtype=np.float64).sum()) for array in weights.values()))


async def prove_publish(
    sampler: Sampler,
    policy: PolicyRef,
    weights: Weights,
    lora: LoraSpec | None = None,
    *,
    previous: Proof | None = None,
    probe: Probe | None = None,
    retire: Sequence[PolicyRef] = (),
) -> Proof:
    """Publish a version, prove that it is served, then retire older ones.

    Checks, in order: the weights differ from the `previous` proof; the fingerprint of the weights that arrived; the
    mean gap of the `probe`. Raises SyncError with the figures.
    """
    proof = _prove_moved(policy, weights, previous)
    await publish_verified(sampler, policy, weights, lora, proof.fingerprint)
    if probe is not None and probe.prompts:
        proof = await _prove_gap(sampler, proof, probe)
    for old in retire:
        await sampler.retire(old)
    return proof


def _prove_moved(policy: PolicyRef, weights: Weights, previous: Proof | None) -> Proof:
    """The proof that an update changed the weights: their fingerprint and norm, and how far the norm moved. Raises
    SyncError if the weights are not finite, or equal to the `previous` ones.
    """
    proof = Proof(policy=policy, fingerprint=fingerprint(weights), norm=weights_norm(weights))
    if not math.isfinite(proof.norm):
        raise SyncError(f"The weights of {policy} are not finite (norm {proof.norm}).", "Lower the learning rate.")
    if previous is None:
        return proof
    if proof.fingerprint == previous.fingerprint:
        raise SyncError(
            f"The weights of {policy} are equal to {previous.policy} (fingerprint {proof.fingerprint}, norm "
            f"{proof.norm:.6g}): the update changed nothing.",
            "Check that the learning rate is above 0 and that groups have different rewards.",
        )
    return msgspec.structs.replace(proof, norm_moved=abs(proof.norm - previous.norm))


async def sampled_gaps(
    sampler: Sampler, policy: PolicyRef, probe: Probe, params: SamplingParams = PROBE
) -> npt.NDArray[np.float64]:
    """Return |log pi_sampler - log pi_train| of each token that a policy samples for the probe, in nats. Raises
    SyncError if it samples none."""
    rows = await probe_rows(sampler, policy, probe.prompts, params)
    trained = np.concatenate(await asyncio.to_thread(probe.logprobs, rows), dtype=np.float64)
    gaps: npt.NDArray[np.float64] = np.abs(trained - np.concatenate([row.logprobs for row in rows]))
    return gaps


async def probe_rows(
    sampler: Sampler, policy: PolicyRef, prompts: Sequence[Sequence[int]], params: SamplingParams = PROBE
) -> list[TrainRow]:
    """Return the answers that a policy samples for these prompts, as rows. Raises SyncError if all are empty."""
    each = -(-PROBE_CANDIDATES // len(prompts))  # rounded up
    completions_of_prompts = await asyncio.gather(*(sampler.sample(ids, each, params, policy) for ids in prompts))
    rows: list[TrainRow] = []
    number = 0
    for prompt_ids, completions in zip(prompts, completions_of_prompts, strict=True):
        for completion in completions:
            if completion.token_ids:
                row = TrainRow(
                    id=f"probe.{number}",
                    role="",
                    prompt_ids=tuple(prompt_ids),
                    response_ids=completion.token_ids,
                    logprobs=completion.logprobs,
                    advantage=0.0,
                    version=policy.version,
                )
                rows.append(row)
            number += 1
    if not rows:
        raise SyncError(f"The probe of {policy} came back empty.", "Probe with other prompts.")
    return rows


async def _prove_gap(sampler: Sampler, proof: Proof, probe: Probe) -> Proof:
    """Compare the log-probabilities of sampler and trainer on samples of the probe, and add their gap to the proof.
    Raises GapError if the mean is above the bound."""
    gap = await sampled_gaps(sampler, proof.policy, probe)
    # `not <=` rather than `>`, so that NaN fails. A few tokens may exceed the bound by chance: ask for more before
    # the error.
    if not gap.mean() <= probe.bound:
        gap = await sampled_gaps(sampler, proof.policy, probe, LONGER)
    mean, worst = float(gap.mean()), float(gap.max())
    if not mean <= probe.bound:
        remedy = "The sampler does not serve the weights that were sent. Check its engine."
        if probe.remedy:
            remedy = (
                "Either the sampler does not serve the weights that were sent, or rounding makes the difference. "
                f"Against rounding: {probe.remedy}"
            )
        raise GapError(
            mean,
            f"Policy {proof.policy}: sampler and trainer differ by {mean:.3g} nats a token (at most {worst:.3g}) over "
            f"{gap.size} tokens; the bound is {probe.bound:g}.",
            remedy,
        )
    return msgspec.structs.replace(proof, probe_gap_mean=mean, probe_gap_max=worst, probe_tokens=int(gap.size))
