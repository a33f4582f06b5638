"""What `cotune doctor` says of memory beside what is then measured, and a table of models on GPUs by the formula.

    python -m benchmarks.doctor --model MODEL [--rows 32] [--sequences 16]
    python -m benchmarks.doctor --paper

Measured: the largest resident size of the learner's process in two updates and of the sampler's process while it serves
two published versions, each fresh; fp32 on the CPU, rows of 64 + 32 tokens. On paper: Qwen3 shapes from their published
configurations, one learner on a GPU, bfloat16, prompts of 1,024 and answers of 1,024 tokens. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from cotune.records.policies import LoraSpec

PROMPT, RESPONSE, GROUP = 64, 32, 8
LORA = LoraSpec(rank=16)
QWEN3 = {
    "Qwen3-0.6B": (1024, 3072, 28, 16, 8, True),
    "Qwen3-1.7B": (2048, 6144, 28, 16, 8, True),
    "Qwen3-4B": (2560, 9728, 36, 32, 8, True),
    "Qwen3-8B": (4096, 12288, 36, 32, 8, False),
}
"""Hidden size, feed-forward size, layers, heads, groups of keys, and whether the output embedding is the input's."""


def configuration(model: str, layout: str, **learner: Any) -> Any:
    from cotune.trainer.config.train import convert

    settings = {"lr": 1e-4, "mini_batch": 64, **learner}
    return convert({"model": model, "policies": layout, "lora": {"rank": 16}, "learner": settings,
                    "sampling": {"max_tokens": RESPONSE, "prefix_cache": "0B"}})  # fmt: skip


def learn(model: str, layout: str, rows: int) -> int:
    """Two updates, each with the copy that a publication makes; the largest resident size in bytes."""
    from benchmarks.memory import make_rows
    from benchmarks.peak_memory import peak_memory
    from cotune.algorithms.catalogue import recipe
    from cotune.records.policies import policies_for
    from cotune.trainer.learner.local import LocalLearner

    settings = configuration(model, layout, device="cpu", threads=1, mini_batch=rows).learner
    made = make_rows(model, rows)
    policies = policies_for(layout, ["a"], LORA)  # type: ignore[arg-type]
    learner = LocalLearner.open(model, policies, settings, recipe("at_grpo").loss)
    for _ in range(2):  # from the second on, activations stand beside the optimizer's moments
        learner.update("a", made)
        learner.weights("a")
    return peak_memory()


async def sample(model: str, layout: str, sequences: int) -> int:
    """Two versions published one after the other, and so many sequences decoded; the sampler's largest size."""
    import numpy as np

    from benchmarks.adapter_shapes import adapter_shapes
    from benchmarks.peak_memory import peak_memory
    from cotune.integrations.models.folder.folder import read_parameters
    from cotune.integrations.models.transformers.sampler import TransformersSampler
    from cotune.records.structs import PolicyRef
    from cotune.sampling.protocol import SamplingParams

    if layout == "full":
        weights = read_parameters(Path(model))
    else:
        weights = {name: np.zeros(shape, np.float32) for name, shape in adapter_shapes(model, LORA).items()}
    sampler = await TransformersSampler.open(model, threads=1, prefix_cache=0, dtype="float32")
    lora = None if layout == "full" else LORA
    for version in (1, 2):
        weights = {name: np.asarray(array) + np.float32(1e-6) for name, array in weights.items()}
        await sampler.publish(PolicyRef("a", version), weights, lora)
        if version == 2:
            await sampler.retire(PolicyRef("a", 1))
    prompt = tuple(range(100, 100 + PROMPT))
    params = SamplingParams(max_tokens=RESPONSE, seed=0)
    await sampler.sample(prompt, sequences, params, PolicyRef("a", 2))
    found = peak_memory(sampler._host._process.pid)
    await sampler.aclose()
    return found


def measured(model: str, part: str, layout: str, count: int) -> float:
    """In bytes, of a process of its own."""
    command = [sys.executable, "-m", "benchmarks.doctor", "--model", model, "--one", part, layout, str(count)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def compare(model: str, rows: int, sequences: int) -> dict[str, Any]:
    from cotune.trainer.before.doctor.machine import look
    from cotune.trainer.before.doctor.memory import Workload, processes
    from cotune.trainer.before.doctor.model_size import measure_folder

    machine, found = look(Path()), {}
    print(f"{'process':16} {'forecast, GB':>12} {'measured':>9} {'ratio':>6}")
    for layout in ("lora", "full"):
        config = configuration(model, layout, device="cpu", mini_batch=rows)
        size = measure_folder(Path(model), LORA if layout == "lora" else None, "float32", joined=True)
        load = Workload(row=PROMPT + RESPONSE, sequences=sequences, policies=1, shared=PROMPT * (GROUP - 1) / GROUP)
        for process, count in zip(processes({model: (size, load)}, config, machine), (rows, sequences), strict=True):
            real = measured(model, process.process, layout, count)
            name, ratio = f"{layout} {process.process}", process.bytes / real
            print(f"{name:16} {process.bytes / 1e9:12.2f} {real / 1e9:9.2f} {ratio:6.2f}", flush=True)
            found[name] = round(ratio, 3)
    return found


def paper() -> dict[str, Any]:
    from transformers import Qwen3Config

    from cotune.trainer.before.doctor.memory import Workload, learner_memory
    from cotune.trainer.before.doctor.model_size import measure

    found: dict[str, Any] = {}
    print(f"{'model':12} {'':5} " + " ".join(f"{f'{gb} GB':>28}" for gb in (24, 48, 80)))
    for name, (hidden, wide, layers, heads, groups, tied) in QWEN3.items():
        shape = Qwen3Config(vocab_size=151936, hidden_size=hidden, intermediate_size=wide, num_hidden_layers=layers,
                            num_attention_heads=heads, num_key_value_heads=groups, head_dim=128,
                            tie_word_embeddings=tied)  # fmt: skip
        for layout in ("lora", "full"):
            size = measure(shape, LORA if layout == "lora" else None, "bfloat16", joined=True, device="cuda")
            cells = []
            for gb in (24, 48, 80):
                config = configuration(name, layout, dtype="bfloat16")
                room = gb * 0.95 * 2**30
                load = Workload(row=2048, sequences=64, policies=1)
                plan = learner_memory(size, config, load, device="GPU", free=room, total=gb * 2**30)
                how = "ckpt" if any("checkpointed" in name for name in plan.parts) else "plain"
                fits = plan.bytes <= room
                cells.append(f"{plan.bytes / 1e9:5.1f} GB, {plan.pass_tokens:5} {how:5}" if fits
                             else f"{plan.bytes / 1e9:5.1f} GB: does not fit")  # fmt: skip
                found[f"{name} {layout} {gb}"] = round(plan.bytes / 1e9, 1) if fits else None
            print(f"{name:12} {layout:5} " + " ".join(f"{cell:>28}" for cell in cells), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--paper", action="store_true")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.paper:
        print(json.dumps(paper()))
        return
    if args.one:
        part, layout, count = args.one
        taken = learn(args.model, layout, int(count)) if part == "learner" else asyncio.run(
            sample(args.model, layout, int(count)))  # fmt: skip
        print(taken)
        return
    from cotune.integrations.models.folder.folder import locate_model

    print(json.dumps({"forecast_over_measured": compare(str(locate_model(args.model)), args.rows, args.sequences)}))


if __name__ == "__main__":
    main()
