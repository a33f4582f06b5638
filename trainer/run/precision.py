"""The precision that `learner.dtype = "auto"` stands for: chosen before the first step, and stored in run.json."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cotune.algorithms.recipes import LossSpec
from cotune.algorithms.samples import TrainRow
from cotune.config.train import TrainConfig
from cotune.integrations.models import bfloat16
from cotune.integrations.models.devices import usual_device
from cotune.integrations.models.engines import ENGINES
from cotune.integrations.models.folder.folder import count_parameters, locate_model
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import SamplingParams
from cotune.storage.run_layout import Precision, read_run
from cotune.trainer.config.engine import engine_kind
from cotune.trainer.learner.batching import lengths_of
from cotune.trainer.learner.loss import Tokens, kept_by_mask, policy_loss
from cotune.trainer.publish import Probe, probe_rows, sampled_gaps
from cotune.trainer.run.run import RolloutRun
from cotune.trainer.run.run_folder import RunFolder

PROMPTS = ("Tell me a story about a river and a boat.", "What is 17 plus 25? Explain each step.")
TRIAL = SamplingParams(temperature=1.0, max_tokens=16, seed=0)


def decide_precision(folder: RunFolder, config: TrainConfig) -> tuple[TrainConfig, Precision | None, list[str]]:
    """Replace "auto" by the precision of this run.

    Returns the configuration, the precision (None if the configuration names one), and notes for the user. A resumed
    run keeps its precision, unless it has moved from a CPU to a GPU or back.
    """
    if config.learner.dtype != "auto":
        return config, None, []
    # 1. A resumed run on the same kind of device.
    device = learner_device(config)
    before = read_run(folder.path).precision
    if before is not None and before.device == device:
        notes = []
        # In bfloat16, a run that ended before its gap was measured is checked and reported like a new one.
        is_checked = before.dtype != "bfloat16" or before.gap is not None
        if is_checked:
            notes.append(f"matrix products in {before.dtype}, as when the run began")
        return with_dtype(config, before.dtype), before, notes

    # 2. A new run, or one that has moved. Once it has fallen back to float32, it stays there.
    dtype = auto_dtype(config, device, multiplies_bfloat16=_has_bfloat16(device))
    chosen = Precision(dtype=dtype, device=device)
    notes = []
    if before is not None:
        if before.fell_back:
            chosen = msgspec.structs.replace(before, device=device)
        notes.append(
            f"the run has trained on {DEVICES[before.device]} in {before.dtype} and continues on {DEVICES[device]} in "
            f"{chosen.dtype}; log-probabilities change by rounding. learner.dtype sets the precision of the learner."
        )
    if device == "cuda" and dtype == "float32":
        notes.append(
            f"{torch.cuda.get_device_name()} does not multiply bfloat16, so the learner computes in float32: frozen "
            "weights take twice the memory, and updates take several times as long as on a GPU that does"
        )
    keep_precision(folder, chosen)
    return with_dtype(config, chosen.dtype), chosen, notes


DEVICES = {"cpu": "the CPU", "cuda": "a GPU"}


def learner_device(config: TrainConfig) -> Literal["cpu", "cuda"]:
    """Return the kind of device of a run's learner."""
    if config.cluster.on_ray:
        return "cuda" if config.cluster.gpus_per_learner else "cpu"
    return usual_device()


def _has_bfloat16(device: str) -> bool:
    """Return whether this kind of device multiplies bfloat16. The GPUs of a cluster are assumed to, if this machine has
    none to ask."""
    if device == "cuda":
        return bfloat16.gpu_has_bfloat16() or not torch.cuda.is_available()
    return bfloat16.has_bfloat16()


def auto_dtype(config: TrainConfig, device: str, *, multiplies_bfloat16: bool) -> str:
    """Return the precision that "auto" stands for on a CPU or GPU that multiplies bfloat16, or does not.

    On a CPU it is bfloat16 only for adapters on frozen weights that are large enough to gain from it, without Ray and
    without vLLM.
    """
    if device == "cuda":
        return "bfloat16" if multiplies_bfloat16 else "float32"
    if not multiplies_bfloat16 or config.cluster.on_ray or engine_kind(config).fixed:
        return "float32"
    kinds: list[str] = [policy.kind for policy in config.policy] or [config.policies]
    if "full" in kinds:
        return "float32"
    all_are_large = all(count_parameters(locate_model(model)) >= bfloat16.LARGE for model in config.bases)
    return "bfloat16" if all_are_large else "float32"


def without_sampler(config: TrainConfig) -> TrainConfig:
    """Replace "auto" for a model that is not compared with a sampler: bfloat16 on a GPU that has it, else float32."""
    if config.learner.dtype != "auto":
        return config
    on_gpu = learner_device(config) == "cuda"
    return with_dtype(config, "bfloat16" if on_gpu and _has_bfloat16("cuda") else "float32")


def keep_precision(folder: RunFolder, precision: Precision) -> None:
    """Write to run.json the precision that "auto" stands for in this run."""
    folder.describe_as({**folder.described, "precision": msgspec.to_builtins(precision)})


def with_dtype(config: TrainConfig, dtype: str) -> TrainConfig:
    """Return the configuration with this precision of the learner."""
    return msgspec.structs.replace(config, learner=msgspec.structs.replace(config.learner, dtype=dtype))


async def largest_gap(run: RolloutRun) -> float:
    """Return the largest mean gap between sampler and learner, in nats a token, measured with one untrained policy of
    each base model."""
    gaps = []
    policies = run.state.policies
    for names in policies.bases(run.config.model).values():
        trained = [name for name in names if policies.specs[name].trained]
        if not trained:
            continue
        policy = trained[0]
        probe = Probe(_render_prompts(run, policy), functools.partial(run.learner.logprobs, policy))
        gaps.append((await sampled_gaps(run.sampler, PolicyRef(policy), probe, TRIAL)).mean())
    return float(max(gaps))


def _render_prompts(run: RolloutRun, policy: str) -> list[list[int]]:
    """Return the token ids of `PROMPTS` in the chat format of a policy."""
    chat = run.chats.of(policy)
    return [chat.render([{"role": "user", "content": text}], tools=None) for text in PROMPTS]


async def check_precision(run: RolloutRun) -> str:
    """Compare sampler and learner in bfloat16 before the first step. If they are too far apart, the run continues in
    float32. Returns a note for the user."""
    gap = await largest_gap(run)
    bound = run.config.probe_bound
    device = learner_device(run.config)
    measured = f"sampler and learner differ by {gap:.2g} nats a token (probe_bound is {bound:g})"
    if gap <= bound:
        keep_precision(run.folder, Precision(dtype="bfloat16", device=device, gap=gap))
        return f"matrix products in bfloat16: {measured}"

    assert run.fall_back is not None
    await run.fall_back(gap, "")  # no role: the gap is of the whole run
    note = f"warning: the run computes in float32, because in bfloat16 {measured}"
    if device == "cuda":  # the sampler still computes in bfloat16, so float32 may not be enough
        remaining_gap = await largest_gap(run)
        note += f"; in float32 they differ by {remaining_gap:.2g}"
        if not remaining_gap <= bound:  # also if it is NaN
            note += f", which will stop the run. {gap_remedy(run.config)}"
    return note


def gap_remedy(config: TrainConfig) -> str:
    """Return settings that reduce the gap between sampler and learner on this machine, the most effective first."""
    learner = config.learner
    engine = config.engine
    device = learner_device(config)
    remedies = []
    # In bfloat16 samplers: 0.0376 nats with rounded logits on both sides, 0.0289 with float32 logits (SmolLM2-135M).
    if engine_kind(config).by_url:
        remedies.append('Start the server with --hf-overrides \'{"head_dtype": "float32"}\', for logits in float32.')
    elif engine not in ENGINES:
        remedies.append(f"Let {engine} compute logits in float32.")
    if learner.quantize != "none":
        remedies.append(f'Set learner.quantize = "none": the sampler does not have the weights of {learner.quantize}.')
    if learner.dtype == "bfloat16":
        cost = ""
        if device == "cuda":
            cost = ", which takes twice the memory for frozen weights and two to eight times as long for updates"
        remedies.append(f'Set learner.dtype = "float32"{cost}.')
    if remedies or device == "cuda":
        remedies.append("Raise probe_bound if the difference is from rounding.")
    return " ".join(remedies)


NARROW = 0.02
"""Rounding alone may move a ratio beyond bounds that are closer to 1 than this. Wider bounds are not measured."""
MOST_NOISE = 0.01
"""Share of tokens that rounding alone may clip or mask."""


async def check_bounds_of_losses(run: RolloutRun) -> list[str]:
    """Measure, before the first step, how many tokens a loss with narrow bounds would clip or mask by rounding alone.

    Above `MOST_NOISE`, a run that chose bfloat16 by itself continues in float32. Returns notes for the user.
    """
    noise = await _noise_of_losses(run)
    if not noise:
        return []
    advice = "Wider bounds, or another precision of learner and sampler, avoid that."
    # Only a run that chose bfloat16 by itself has a `fall_back`. Any other continues as it is, with the warning.
    if run.fall_back is None:
        return [f"warning: {noise}. {advice}"]

    precision = read_run(run.folder.path).precision
    gap = None if precision is None else precision.gap
    await run.fall_back(gap, noise)
    remaining_noise = await _noise_of_losses(run)
    if remaining_noise:
        return [f"warning: in float32, too, {remaining_noise}. {advice}"]
    return [f"warning: the run computes in float32, because in bfloat16 {noise}"]


async def _noise_of_losses(run: RolloutRun) -> str:
    """Return the first bound of a loss that rounding alone reaches too often, with the measured share; an empty text
    without one.

    The log-probabilities of the same rows are computed in one pass and one by one. They differ only by rounding.
    """
    policies = run.state.policies
    for name in policies.trained:
        loss = run.recipes.of(name).loss
        if not narrow_bounds(loss):
            continue
        rows = await probe_rows(run.sampler, PolicyRef(name), _render_prompts(run, name), TRIAL)
        in_one_pass = await asyncio.to_thread(run.learner.logprobs, name, rows)
        one_by_one: list[npt.NDArray[np.float32]] = []
        for row in rows:
            one_by_one += await asyncio.to_thread(run.learner.logprobs, name, [row])
        noise = noise_of_loss(loss, rows, in_one_pass, one_by_one)
        if noise:
            return f"{noise} (policy {name})"
    return ""


def narrow_bounds(loss: LossSpec) -> bool:
    """Return whether the loss has bounds that rounding may reach."""
    if _clips(loss) and min(loss.clip_low, loss.clip_high) < NARROW:
        return True
    low, high = loss.mask_bounds
    return loss.mask != "none" and (1.0 - low < NARROW or high - 1.0 < NARROW)


def _clips(loss: LossSpec) -> bool:
    """Return whether the loss clips a ratio."""
    return loss.ratio != "none" and loss.style != "none" and not loss.token_loss


Logprobs = Sequence[npt.NDArray[np.float32]]


def noise_of_loss(loss: LossSpec, rows: Sequence[TrainRow], before: Logprobs, after: Logprobs) -> str:
    """Describe the tokens that the loss would clip or mask although no weight has changed. Returns an empty text if
    they are at most `MOST_NOISE` of all.

    `before` and `after` have the log-probabilities of each row's response tokens, computed by the same weights in
    different passes. In low precision each pass rounds differently, like the passes before and after an optimizer step.
    The clip compares the two. The mask compares `before` with the log-probabilities of the sampler.
    """
    old = torch.from_numpy(np.concatenate(before)).float()  # [N], as all tensors here
    new = torch.from_numpy(np.concatenate(after)).float()
    sampler = torch.from_numpy(np.concatenate([np.asarray(row.logprobs, np.float32) for row in rows]))
    row_of_token = torch.arange(len(rows)).repeat_interleave(torch.tensor(lengths_of(rows)))

    if loss.mask != "none":
        masked_share = 1.0 - float(kept_by_mask(loss, old - sampler, row_of_token).float().mean())
        if masked_share > MOST_NOISE:
            low, high = loss.mask_bounds
            bounds = f"mask = {loss.mask!r} with the bounds {low:g} and {high:g} (mask_range)"
            return f"the rounding of sampler and learner alone masks {masked_share:.1%} of tokens: {bounds}"

    if _clips(loss):
        clipped_share = _clipped_share(loss, old, new, sampler, row_of_token)
        if clipped_share > MOST_NOISE:
            bounds = f"clip_low = {loss.clip_low:g} and clip_high = {loss.clip_high:g}"
            return f"rounding alone clips {clipped_share:.1%} of tokens: {bounds}"
    return ""


def _clipped_share(loss: LossSpec, old: Tensor, new: Tensor, sampler: Tensor, row_of_token: Tensor) -> float:
    """Return the share of tokens that the loss clips, over both signs of the advantage. A positive advantage is clipped
    only above the ratio's upper bound, and a negative one only below the lower bound."""
    # Terms of the loss that need further inputs do not change which tokens are clipped.
    clipping = msgspec.structs.replace(loss, kl=0.0, entropy=0.0)
    shares = []
    for sign in (1.0, -1.0):
        tokens = Tokens(
            new=new,
            sampler=sampler,
            old=old,
            advantage=torch.full_like(old, sign),
            weight=torch.full_like(old, 1.0 / len(old)),
            row=row_of_token,
        )
        shares.append(float(policy_loss(clipping, tokens).clipped.float().mean()))
    return sum(shares) / len(shares)
