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
from cotune.sampling.protocol import Sampler, SamplingParams, Weights, fingerprint, publish_verified, weights_norm

PROBE = SamplingParams(temperature=1.0, max_tokens=2, seed=0)
"""The sampling of the probe. It is not truncated, so that the trainer's log-probabilities are of the same distribution.
The first token comes from the pass over the prompt, the second from a decode step. Further steps would cost more than
further candidates."""
LONGER = msgspec.structs.replace(PROBE, max_tokens=16, seed=1)
"""The sampling of a longer probe, which decides if the gap of the first one is above the bound. In bfloat16, a few
unlikely tokens may cause most of a gap."""
PROBE_CANDIDATES = 16
PROBE_PROMPTS = 4
PROBE_PROMPT = 32
"""The most tokens of a prompt of the probe. Any text shows whether weights differ. Nothing is cached for a new version,
so the probe takes longer than the rest of a publication."""


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """Evidence that a version is served. The probe gap is |log pi_sampler - log pi_train| of a token, in nats."""

    policy: PolicyRef
    fingerprint: str
    norm: float
    """The L2 norm of all weights."""
    norm_moved: float = 0.0
    """The change of the norm since the previous version; 0 for the first version."""
    probe_gap_mean: float = 0.0
    probe_gap_max: float = 0.0
    probe_tokens: int = 0
    """The number of sampled tokens over which the gap is measured."""


@dataclass(frozen=True)
class Probe:
    """A comparison of the sampler with the trainer, on a few answers of a version."""

    prompts: Sequence[Sequence[int]]
    """Token ids of prompts. At least `PROBE_CANDIDATES` answers to them are sampled in all."""
    logprobs: Callable[[Sequence[TrainRow]], Sequence[npt.NDArray[Any]]]
    """The trainer's function for the log-probabilities of each row's response tokens."""
    bound: float = 1e-2
    """The largest allowed mean gap, in nats a token."""
    remedy: str = ""
    """How to reduce a gap from rounding. Empty if sampler and trainer both compute in float32."""


def probe_prompts(prompts: Iterable[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return a few different beginnings of prompts."""
    beginnings = dict.fromkeys(tuple(ids[:PROBE_PROMPT]) for ids in prompts)
    return list(beginnings)[:PROBE_PROMPTS]


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
    """Publish a version, prove that it is served, then retire the versions in `retire`.

    The proof has three parts: the weights differ from the version of the `previous` proof, the weights that arrived
    have their fingerprint, and the mean gap of the `probe` is within its bound. Raises SyncError with the figures.
    """
    proof = _prove_moved(policy, weights, previous)
    await publish_verified(sampler, policy, weights, lora, proof.fingerprint)
    if probe is not None and probe.prompts:
        proof = await _prove_gap(sampler, proof, probe)
    for old in retire:
        await sampler.retire(old)
    return proof


def _prove_moved(policy: PolicyRef, weights: Weights, previous: Proof | None) -> Proof:
    """Return the proof that an update has changed the weights, with their fingerprint, their norm and its change.
    Raises SyncError if the weights are not finite, or equal to the weights of the `previous` proof."""
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
    of_trainer = np.concatenate(await asyncio.to_thread(probe.logprobs, rows), dtype=np.float64)
    of_sampler = np.concatenate([row.logprobs for row in rows])
    gaps: npt.NDArray[np.float64] = np.abs(of_trainer - of_sampler)
    return gaps


async def probe_rows(
    sampler: Sampler, policy: PolicyRef, prompts: Sequence[Sequence[int]], params: SamplingParams = PROBE
) -> list[TrainRow]:
    """Return the answers that a policy samples for these prompts, as rows. Empty answers are left out. Raises SyncError
    if all are empty."""
    per_prompt = math.ceil(PROBE_CANDIDATES / len(prompts))
    requests = [sampler.sample(prompt_ids, per_prompt, params, policy) for prompt_ids in prompts]
    completions_of_prompts = await asyncio.gather(*requests)
    rows: list[TrainRow] = []
    for prompt_ids, completions in zip(prompts, completions_of_prompts, strict=True):
        for completion in completions:
            if not completion.token_ids:
                continue
            row = TrainRow(
                id=f"probe.{len(rows)}",
                role="",
                prompt_ids=tuple(prompt_ids),
                response_ids=completion.token_ids,
                logprobs=completion.logprobs,
                advantage=0.0,
                version=policy.version,
            )
            rows.append(row)
    if not rows:
        raise SyncError(f"The probe of {policy} came back empty.", "Probe with other prompts.")
    return rows


async def _prove_gap(sampler: Sampler, proof: Proof, probe: Probe) -> Proof:
    """Compare the log-probabilities of sampler and trainer on samples of the probe, and return the proof with their
    gap. Raises GapError if the mean gap is above the bound."""
    gaps = await sampled_gaps(sampler, proof.policy, probe)
    # A few tokens may exceed the bound by chance, so sample more before the error. `not <=` rather than `>`, so that
    # NaN fails.
    if not gaps.mean() <= probe.bound:
        gaps = await sampled_gaps(sampler, proof.policy, probe, LONGER)
    mean = float(gaps.mean())
    largest = float(gaps.max())
    if not mean <= probe.bound:
        remedy = "The sampler does not serve the weights that were sent. Check its engine."
        if probe.remedy:
            remedy = (
                "Either the sampler does not serve the weights that were sent, or rounding makes the difference. "
                f"Against rounding: {probe.remedy}"
            )
        raise GapError(
            mean,
            f"Policy {proof.policy}: sampler and trainer differ by {mean:.3g} nats a token (at most {largest:.3g}) "
            f"over {gaps.size} tokens; the bound is {probe.bound:g}.",
            remedy,
        )
    return msgspec.structs.replace(proof, probe_gap_mean=mean, probe_gap_max=largest, probe_tokens=int(gaps.size))
