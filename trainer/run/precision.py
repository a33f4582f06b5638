"""The precision that `learner.dtype = "auto"` is for a run: found before the first step, and kept in run.json."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from cotune.algorithms.recipes import LossSpec
from cotune.algorithms.samples import TrainRow
from cotune.integrations.models.folder.folder import count_parameters, locate_model
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import SamplingParams
from cotune.storage.run_layout import Precision, read_run
from cotune.trainer.config.train import TrainConfig
from cotune.trainer.learner.loss import Tokens, policy_loss, unmasked
from cotune.trainer.publish import Probe, closer_logits, probe_rows, sampled_gaps
from cotune.trainer.run.run import RolloutRun
from cotune.trainer.run.run_folder import RunFolder

PROMPTS = ("Tell me a story about a river and a boat.", "What is 17 plus 25? Explain each step.")
TRIAL = SamplingParams(temperature=1.0, max_tokens=16, seed=0)


def decide_precision(folder: RunFolder, config: TrainConfig) -> tuple[TrainConfig, Precision | None]:
    """`config` without "auto", and what "auto" is for this run, whatever this machine would choose later; None where
    the configuration names a precision."""
    if config.learner.dtype != "auto":
        return config, None
    found = read_run(folder.path).precision
    if found is None:
        found = Precision(dtype=_choose(config))
        keep_precision(folder, found)
    return with_dtype(config, found.dtype), found


def keep_precision(folder: RunFolder, found: Precision) -> None:
    """Write to run.json what "auto" is for this run."""
    folder.describe_as({**folder.described, "precision": msgspec.to_builtins(found)})


def with_dtype(config: TrainConfig, dtype: str) -> TrainConfig:
    """`config` with this precision of the learner."""
    return msgspec.structs.replace(config, learner=msgspec.structs.replace(config.learner, dtype=dtype))


def _choose(config: TrainConfig) -> str:
    from cotune.integrations.models.bfloat16 import has_bfloat16

    on_gpu = config.learner.device != "cpu" and torch.cuda.is_available()
    return auto_dtype(config, there=has_bfloat16() and not on_gpu)


def auto_dtype(config: TrainConfig, *, there: bool) -> str:
    """What "auto" is where the learner is on a CPU that multiplies bfloat16 (`there`), or is not."""
    from cotune.integrations.models.bfloat16 import LARGE

    kinds: list[str] = [policy.kind for policy in config.policy] or [config.policies]
    if not there or config.cluster.address or "full" in kinds:
        return "float32"
    large = all(count_parameters(locate_model(model)) >= LARGE for model in config.bases)
    return "bfloat16" if large else "float32"


async def largest_gap(run: RolloutRun) -> float:
    """The mean gap between sampler and learner, in nats a token, of the untrained policies: one of each base, and the
    largest."""
    gaps, policies = [], run.state.policies
    for names in policies.bases(run.config.model).values():
        if trained := [name for name in names if policies.specs[name].trained]:
            name = trained[0]
            prompts = [run.chats.of(name).render([{"role": "user", "content": text}], None) for text in PROMPTS]
            probe = Probe(prompts, lambda rows, name=name: run.learner.logprobs(name, rows))  # type: ignore[misc]
            gaps.append((await sampled_gaps(run.sampler, PolicyRef(name), probe, TRIAL)).mean())
    return float(max(gaps))


async def check_precision(run: RolloutRun) -> str:
    """Compare sampler and learner in bfloat16 before the first step, and go on in float32 where they are too far
    apart. Returns what the user should know."""
    gap = await largest_gap(run)
    said = f"sampler and learner differ by {gap:.2g} nats a token (probe_bound is {run.config.probe_bound:g})"
    if not gap <= run.config.probe_bound:
        assert run.fall_back is not None
        await run.fall_back(gap, "")
        remedy = await closer_logits(run.sampler)
        advice = f". To train in bfloat16, {remedy.rstrip(', ')}." if remedy else ""
        return f"warning: in float32, as in bfloat16 {said}{advice}"
    keep_precision(run.folder, Precision(dtype="bfloat16", gap=gap))
    return f"matrix products in bfloat16: {said}"


NARROW = 0.02
"""Bounds nearer to 1 than this may be within what rounding makes of a ratio; wider ones are not measured."""
MOST_NOISE = 0.01
"""Share of tokens that rounding alone may clip or mask."""


async def check_bounds_of_losses(run: RolloutRun) -> list[str]:
    """Measure, before the first step, how many tokens a loss with narrow bounds would clip or mask by rounding alone.

    Above `MOST_NOISE`, a run that chose bfloat16 by itself goes on in float32. Returns what the user should know.
    """
    noise = await _noise_of_losses(run)
    if not noise:
        return []
    if run.fall_back is not None:
        await run.fall_back(_gap_of(run), noise)
        left = await _noise_of_losses(run)
        if not left:
            return [f"warning: in float32, as in bfloat16 {noise}"]
        noise = f"in float32, too, {left}"
    return [f"warning: {noise}. Wider bounds, or another precision of learner and sampler, avoid that."]


def _gap_of(run: RolloutRun) -> float | None:
    found = read_run(run.folder.path).precision
    return None if found is None else found.gap


async def _noise_of_losses(run: RolloutRun) -> str:
    """The first bound that rounding reaches too often, with the measured share; empty if there is none."""
    policies = run.state.policies
    for name in policies.trained:
        loss = run.recipes.of(name).loss
        if not narrow_bounds(loss):
            continue
        prompts = [run.chats.of(name).render([{"role": "user", "content": text}], None) for text in PROMPTS]
        rows = await probe_rows(run.sampler, PolicyRef(name), prompts, TRIAL)
        together = await asyncio.to_thread(run.learner.logprobs, name, rows)
        alone = [(await asyncio.to_thread(run.learner.logprobs, name, [row]))[0] for row in rows]
        if noise := noise_of_loss(loss, rows, together, alone):
            return f"{noise} (policy {name})"
    return ""


def narrow_bounds(loss: LossSpec) -> bool:
    """Whether the loss has bounds that rounding may reach."""
    if _clips(loss) and min(loss.clip_low, loss.clip_high) < NARROW:
        return True
    low, high = loss.mask_bounds
    return loss.mask != "none" and (1.0 - low < NARROW or high - 1.0 < NARROW)


def _clips(loss: LossSpec) -> bool:
    return loss.ratio != "none" and loss.style != "none" and not loss.token_loss


Logprobs = Sequence[npt.NDArray[np.float32]]


def noise_of_loss(loss: LossSpec, rows: Sequence[TrainRow], once: Logprobs, again: Logprobs) -> str:
    """What the loss would clip or mask although no weight changed, if that is more than `MOST_NOISE` of the tokens.

    `once` and `again` are log-probabilities of the rows' answers by the same weights, computed in different passes: in
    low precision each pass rounds in its own way, as before and after an optimizer step. The clip compares the two,
    the mask compares `once` with the sampler's.
    """
    old, new = (torch.from_numpy(np.concatenate(part)).float() for part in (once, again))
    sampler = torch.from_numpy(np.concatenate([np.asarray(row.logprobs, np.float32) for row in rows]))
    row = torch.arange(len(rows)).repeat_interleave(torch.tensor([len(one.response_ids) for one in rows]))

    if loss.mask != "none":
        share = 1.0 - float(unmasked(loss, old - sampler, row).float().mean())
        if share > MOST_NOISE:
            low, high = loss.mask_bounds
            bounds = f"mask = {loss.mask!r} with bounds {low:g} and {high:g} (mask_low, mask_high)"
            return f"the rounding of sampler and learner alone masks {share:.1%} of tokens: {bounds}"

    if _clips(loss):
        sign = torch.where(row % 2 == 0, 1.0, -1.0)  # a clip holds one side only, by the sign of the advantage
        shares = []
        for advantage in (sign, -sign):
            weight = torch.full_like(old, 1.0 / len(old))
            # Terms that need more than these figures do not change what is clipped.
            plain = msgspec.structs.replace(loss, kl=0.0, entropy=0.0)
            parts = policy_loss(plain, Tokens(new, sampler, old, advantage, weight, row))
            shares.append(float(parts.clipped.float().mean()))
        share = sum(shares) / 2
        if share > MOST_NOISE:
            bounds = f"clip_low = {loss.clip_low:g} and clip_high = {loss.clip_high:g}"
            return f"rounding alone clips {share:.1%} of tokens: {bounds}"
    return ""
