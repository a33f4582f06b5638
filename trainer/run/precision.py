"""Whether sampler and learner agree in bfloat16 on the CPU, before a run makes its first step."""

from __future__ import annotations

from cotune.records.policies import Policies
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import ChatFormats, Sampler, SamplingParams
from cotune.trainer.config.train import TrainConfig
from cotune.trainer.learner.protocol import Learner
from cotune.trainer.publish import Probe, sampled_gaps

PROMPTS = ("Tell me a story about a river and a boat.", "What is 17 plus 25? Explain each step.")
TRIAL = SamplingParams(temperature=1.0, max_tokens=16, seed=0)


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
