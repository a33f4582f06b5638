"""The precision that `learner.dtype = "auto"` is for a run: found before the first step, and kept in run.json."""

from __future__ import annotations

import msgspec

from cotune.integrations.models.folder.folder import count_parameters, locate_model
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import SamplingParams
from cotune.storage.run_layout import Precision, read_run
from cotune.trainer.config.train import TrainConfig
from cotune.trainer.publish import Probe, sampled_gaps
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
    import torch

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
        await run.fall_back(gap)
        return f"warning: in float32, as in bfloat16 {said}"
    keep_precision(run.folder, Precision(dtype="bfloat16", gap=gap))
    return f"matrix products in bfloat16: {said}"
