"""How far sampler and learner are apart in bfloat16, in nats a token, with the precision of a GPU on a CPU.

    python -m benchmarks.gap --sets 40 --publications 100 --out build/gap.jsonl

The model is SmolLM2-135M-Instruct with a random adapter. The engine holds and computes everything in bfloat16 through
the library's layers, as on a GPU. The learner has bfloat16 weights and a float32 adapter under autocast, as one rank of
several has; the layers of a learner of one process round about as much (`test_products`). Each set of prompts is
measured with both probes of a publication. Each publication has an adapter and prompts of its own, and is refused as a
run would refuse it. The file has a line for each; a stopped measurement can be continued.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from cotune.algorithms.catalogue import recipe
from cotune.config.train import TrainConfig
from cotune.errors import GapError
from cotune.integrations.models import bfloat16
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.integrations.models.folder.folder import locate_model
from cotune.integrations.models.transformers import batch
from cotune.integrations.models.transformers.sampler import TransformersSampler
from cotune.records.policies import LoraSpec, policies_for
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import Weights
from cotune.trainer.learner.local import LocalLearner
from cotune.trainer.publish import LONGER, PROBE, Probe, probe_prompts, prove_publish, sampled_gaps
from examples.word_problems.demo import pretrained
from tests.trainer.learner.forced import ForcedSettings

TOPICS = [
    "rivers",
    "trains",
    "prime numbers",
    "the moon",
    "bread",
    "a robot",
    "taxes",
    "chess",
    "whales",
    "wine",
    "bridges",
    "maps",
    "a thief",
    "a garden",
    "Rome",
    "DNA",
    "jazz",
    "ants",
    "rust",
    "poetry",
    "snow",
    "tea",
    "gold",
    "islands",
    "clocks",
    "moss",
    "ink",
    "salt",
    "owls",
    "glass",
    "wool",
    "mills",
    "ports",
    "kites",
    "caves",
    "moths",
]
FORMS = (
    "You are the planner. Plan how to explain {topic}.",
    "What is known about {topic}? Answer in JSON.",
    "Compute {number}*7 and tell me about {topic}.",
    "Write a short story about {topic}.",
)
LORA = LoraSpec(rank=16, alpha=32.0)
MOVED = 2e-3
"""Standard deviation of the adapter's second matrix, as after some tens of updates."""


def prompts_of(chat: ChatTemplate, number: int) -> list[tuple[int, ...]]:
    """The prompts of one set: the probe's share of a prompt of each form."""
    draw = random.Random(number)
    texts = [form.format(topic=draw.choice(TOPICS), number=draw.randint(3, 99)) for form in FORMS]
    return probe_prompts([chat.render([{"role": "user", "content": text}], None) for text in texts])


def adapter_of(initial: Weights, number: int) -> Weights:
    """A trained adapter: its second matrices are random, and not 0 as in the initial one."""
    draw = np.random.default_rng(number)
    return {
        name: array if "lora_A" in name else (MOVED * draw.standard_normal(array.shape)).astype(np.float32)
        for name, array in initial.items()
    }


def compute_as_a_gpu() -> None:
    """Let models in bfloat16 compute in this process as on a GPU: by the library's attention, and without the products
    of a processor that multiplies bfloat16 itself."""
    batch.use_rows_attention = lambda model: False
    bfloat16.has_bfloat16 = lambda: False
    speed_up_bfloat16()


def speed_up_bfloat16() -> None:
    """Multiply bfloat16 matrices in float32 and round the result, as a GPU does: six times as fast on a processor
    without instructions for bfloat16."""

    def wide(a: Tensor, b: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(a.float(), b.float().t(), None, "none", [], "")
        return product

    def mm(a: Tensor, b: Tensor) -> Tensor:
        return wide(a, b).to(a.dtype)

    def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        return (bias.float() * beta + wide(a, b) * alpha).to(a.dtype)

    for name, replacement in (("mm", mm), ("addmm", addmm)):
        PRODUCTS.impl(name, replacement, "CPU")


PRODUCTS = torch.library.Library("aten", "IMPL")


async def measure(args: argparse.Namespace) -> None:
    """Measure the entries that the file does not have yet, and append them."""
    done = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    folder = str(locate_model(pretrained()))
    chat = ChatTemplate.load(folder)
    settings = ForcedSettings(device="cpu", threads=1, dtype=args.learner)
    learner = LocalLearner.open(folder, policies_for("lora", ["a"], LORA), settings, recipe("at_grpo").loss)
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    sampler = await TransformersSampler.open(network, host="thread", end_token_ids=(2,), threads=1)
    initial = learner.weights("a")

    def append(line: dict[str, Any]) -> None:
        with args.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(line, flush=True)

    weights = adapter_of(initial, 0)
    learner.adopt("a", weights)
    await sampler.publish(PolicyRef("a", 1), weights, LORA)
    for number in range(sum("set" in line for line in done), args.sets):
        began = time.perf_counter()
        probe = Probe(prompts_of(chat, number), lambda rows: learner.logprobs("a", rows))
        short, longer = [
            float((await sampled_gaps(sampler, PolicyRef("a", 1), probe, how)).mean()) for how in (PROBE, LONGER)
        ]
        append({"set": number, "probe": short, "longer": longer, "seconds": round(time.perf_counter() - began, 1)})

    for number in range(sum("publication" in line for line in done), args.publications):
        ref, weights = PolicyRef("a", number + 2), adapter_of(initial, number + 1)
        learner.adopt("a", weights)
        bound = TrainConfig(model=folder).probe_bound
        probe = Probe(prompts_of(chat, 1000 + number), lambda rows: learner.logprobs("a", rows), bound)
        line: dict[str, Any] = {"publication": number}
        try:
            proof = await prove_publish(sampler, ref, weights, LORA, probe=probe)
            line |= {"gap": proof.probe_gap_mean, "tokens": proof.probe_tokens, "refused": False}
        except GapError as error:
            line |= {"gap": error.gap, "refused": True}
        await sampler.retire(ref)
        append(line)
    await sampler.aclose()


def conclude(out: Path) -> None:
    """Print a summary of the lines of the file."""
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    for probe in ("probe", "longer"):
        gaps = np.array([line[probe] for line in lines if "set" in line])
        if len(gaps):
            above = int((gaps > 0.04).sum())
            print(f"{probe}: mean {gaps.mean():.4f}, largest {gaps.max():.4f}, {above} of {len(gaps)} above 0.04")
    published = [line for line in lines if "publication" in line]
    if published:
        print(f"{sum(line['refused'] for line in published)} of {len(published)} publications refused")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=40)
    parser.add_argument("--publications", type=int, default=100)
    parser.add_argument("--learner", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--out", type=Path, default=Path("build/gap.jsonl"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    compute_as_a_gpu()
    asyncio.run(measure(args))
    conclude(args.out)


if __name__ == "__main__":
    main()
