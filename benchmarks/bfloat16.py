"""The gains and costs of bfloat16 on the CPU: products at the shapes of SmolLM2-135M, and log-probabilities.

    python -m benchmarks.bfloat16 [--gap]

Products in CPU microseconds, the fastest of some rounds: in fp32, in bfloat16, and with a weight that is packed once.
`--gap`: |log pi_sampler - log pi_learner| of samples of SmolLM2 with a random adapter, in both precisions of each.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch.nn.functional import linear

from cotune.algorithms.catalogue import recipe
from cotune.algorithms.samples import TrainRow
from cotune.integrations.models.bfloat16 import pack, product
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.integrations.models.folder.folder import locate_model
from cotune.integrations.models.transformers.sampler import TransformersSampler
from cotune.records.policies import LoraSpec, policies_for
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import SamplingParams, Weights
from cotune.trainer.learner.local import LocalLearner
from examples.word_problems.demo import pretrained
from tests.trainer.learner.forced import ForcedSettings

SHAPES = ((576, 576), (1536, 576), (576, 49152))
TEXTS = (
    "Alice has 3 apples and buys 14 more. How many?",
    "Name a colour and say why you like it.",
    "What is 17 times 23?",
)
POLICY, LORA = PolicyRef("a", 1), LoraSpec(rank=16)


def microseconds(do: Callable[[], object], count: int) -> float:
    """CPU of one of `count` in a row, in the fastest of five rounds."""
    times = []
    for _ in range(6):
        began = time.process_time()
        for _ in range(count):
            do()
        times.append((time.process_time() - began) / count)
    return 1e6 * min(times[1:])


def products() -> None:
    print(f"{'rows':>6} {'in x out':>12} {'fp32':>10} {'bfloat16':>10} {'packed':>10}")
    for rows in (1, 8, 64, 512, 3072):
        for width, out in SHAPES[: 3 if rows < 512 else 2]:
            weight, x = torch.randn(out, width), torch.randn(rows, width)
            half, rounded = x.bfloat16(), weight.bfloat16()
            packed, count = pack(rounded), max(1, min(300, int(5e8 / (rows * width * out))))
            ways = (partial(linear, x, weight), partial(linear, half, rounded), partial(product, half, packed))
            cells = " ".join(f"{microseconds(do, count):10.0f}" for do in ways)
            print(f"{rows:6} {f'{width} x {out}':>12} {cells}", flush=True)


async def answers(folder: str, dtype: str, prompts: Sequence[Sequence[int]], weights: Weights) -> list[TrainRow]:
    sampler = await TransformersSampler.open(
        folder, device="cpu", threads=1, dtype=dtype, host="thread", prefix_cache=0
    )
    await sampler.publish(POLICY, weights, LORA)
    params = SamplingParams(max_tokens=16, seed=0)
    drawn = await asyncio.gather(*(sampler.sample(ids, 8, params, POLICY) for ids in prompts))
    await sampler.aclose()
    pairs = [(ids, candidate) for ids, candidates in zip(prompts, drawn, strict=True) for candidate in candidates]
    return [
        TrainRow(
            id=str(i),
            role="a",
            prompt_ids=tuple(ids),
            response_ids=candidate.token_ids,
            logprobs=candidate.logprobs,
            advantage=0.0,
        )
        for i, (ids, candidate) in enumerate(pairs)
    ]


def gaps() -> None:
    folder = str(locate_model(pretrained()))
    chat = ChatTemplate.load(folder)
    prompts = [chat.render([{"role": "user", "content": text}], None) for text in TEXTS]
    policies, chance = policies_for("lora", ["a"], LORA), np.random.default_rng(0)
    learners = {}
    for dtype in ("float32", "bfloat16"):
        settings = ForcedSettings(device="cpu", threads=1, dtype=dtype)
        learners[dtype] = LocalLearner.open(folder, policies, settings, recipe("at_grpo").loss)
    weights = {
        name: array if "lora_A" in name else (0.02 * chance.standard_normal(array.shape)).astype(np.float32)
        for name, array in learners["float32"].weights("a").items()
    }
    for sampled in learners:
        rows = asyncio.run(answers(folder, sampled, prompts, weights))
        sampled_logprobs = np.concatenate([row.logprobs for row in rows])
        for dtype, learner in learners.items():
            learner.adopt("a", weights)
            gap = np.abs(np.concatenate(learner.logprobs("a", rows)) - sampled_logprobs)
            print(f"sampler {sampled}, learner {dtype}: mean {gap.mean():.4f}, 99% under {np.quantile(gap, 0.99):.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gap", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with torch.inference_mode():
        products()
    if args.gap:
        gaps()


if __name__ == "__main__":
    main()
