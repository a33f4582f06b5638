"""The precision that `learner.dtype = "auto"` is for a run: found before the first step, and kept in run.json."""

from __future__ import annotations

import msgspec

from cotune.records.policies import Policies
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import ChatFormats, Sampler, SamplingParams
from cotune.storage.run_layout import Precision, read_run
from cotune.trainer.config.train import TrainConfig
from cotune.trainer.learner.protocol import Learner
from cotune.trainer.publish import Probe, sampled_gaps
from cotune.trainer.run.run_folder import RunFolder

PROMPTS = ("Tell me a story about a river and a boat.", "What is 17 plus 25? Explain each step.")
TRIAL = SamplingParams(temperature=1.0, max_tokens=16, seed=0)


def kept_precision(folder: RunFolder, config: TrainConfig) -> TrainConfig:
    """`config` with the precision that "auto" was when the run began, whatever this machine would choose."""
    found = read_run(folder.path).precision
    return config if config.learner.dtype != "auto" or found is None else with_dtype(config, found.dtype)


def keep_precision(folder: RunFolder, found: Precision) -> None:
    """Write to run.json what "auto" is for this run."""
    folder.describe_as({**folder.described, "precision": msgspec.to_builtins(found)})


def with_dtype(config: TrainConfig, dtype: str) -> TrainConfig:
    """`config` with this precision of the learner."""
    return msgspec.structs.replace(config, learner=msgspec.structs.replace(config.learner, dtype=dtype))


async def largest_gap(
    config: TrainConfig, policies: Policies, sampler: Sampler, learner: Learner, chats: ChatFormats
) -> float:
    """The mean gap between both, in nats a token, of the untrained policies: one of each base, and the largest."""
    gaps = []
    for names in policies.bases(config.model).values():
        if trained := [name for name in names if policies.specs[name].trained]:
            name = trained[0]
            prompts = [chats.of(name).render([{"role": "user", "content": text}], None) for text in PROMPTS]
            probe = Probe(prompts, lambda rows, name=name: learner.logprobs(name, rows))  # type: ignore[misc]
            gaps.append((await sampled_gaps(sampler, PolicyRef(name), probe, TRIAL)).mean())
    return float(max(gaps))
