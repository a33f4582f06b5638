"""The forecast of memory by `cotune doctor` and the measured memory, and a table of models on GPUs by the formula.

    python -m benchmarks.doctor --model MODEL [--rows 32] [--sequences 16]
    python -m benchmarks.doctor --paper

Measured: the largest resident size of the learner's process in two updates and of the sampler's process while it serves
two published versions, each fresh; fp32 on the CPU, rows of 64 + 32 tokens. On paper: Qwen3 shapes from their published
configurations, learner and sampler in process on one GPU with nothing else on it, two roles, bfloat16, default steps
(128 answers at once), prompts of 1,024 and answers of 256 tokens; and the learner alone with rows of 65,536 tokens, two
LoRAs of rank 16. The last line is JSON, with `--paper` the last two.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from cotune.records.policies import LoraSpec

if TYPE_CHECKING:
    from cotune.trainer.before.doctor.memory import ProcessMemory

PROMPT, RESPONSE, GROUP = 64, 32, 8
LORA = LoraSpec(rank=16)
PAPER_PROMPT, PAPER_ANSWER, PAPER_ANSWERS = 1024, 256, 128
PAPER_GPUS = (8, 12, 16, 24, 80)
LONG_ROW = 65_536
PAPER_KINDS = {
    "LoRA, 4-bit base": {"policies": "lora", "learner": {"quantize": "4bit"}},
    "LoRA": {"policies": "lora"},
    "all weights": {"policies": "full"},
}


def configuration(model: str, layout: str, **learner: Any) -> Any:
    from cotune.trainer.config.load import convert

    settings = {"lr": 1e-4, "mini_batch": 64, **learner}
    return convert({"model": model, "policies": layout, "lora": {"rank": 16}, "learner": settings,
                    "sampling": {"max_tokens": RESPONSE, "repeatable": True}})  # fmt: skip


def learn(model: str, layout: str, rows: int) -> int:
    """Two updates, each with the copy that a publication makes; the largest resident size in bytes."""
    import msgspec

    from benchmarks.memory import make_rows
    from benchmarks.peak_memory import peak_memory
    from cotune.algorithms.catalogue import recipe
    from cotune.records.policies import policies_for
    from cotune.trainer.learner.local import LocalLearner
    from tests.trainer.learner.forced import ForcedSettings

    configured = configuration(model, layout, mini_batch=rows).learner
    settings = ForcedSettings(**msgspec.structs.asdict(configured), device="cpu", threads=1)
    made = make_rows(model, rows)
    policies = policies_for(layout, ["a"], LORA)  # type: ignore[arg-type]
    learner = LocalLearner.open(model, policies, settings, recipe("at_grpo").loss)
    for _ in range(2):  # from the second on, the optimizer's moments take memory too
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
    peak = peak_memory(sampler._host._process.pid)
    await sampler.aclose()
    return peak


def measured(model: str, part: str, layout: str, count: int) -> float:
    """In bytes, of a process of its own."""
    command = [sys.executable, "-m", "benchmarks.doctor", "--model", model, "--one", part, layout, str(count)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def compare(model: str, rows: int, sequences: int) -> dict[str, Any]:
    from cotune.trainer.before.doctor.machine import examine_machine
    from cotune.trainer.before.doctor.memory import Workload, forecast_processes
    from cotune.trainer.before.doctor.model_size import measure_folder

    # The measured learner and sampler are on the CPU.
    machine = msgspec.structs.replace(examine_machine(Path()), gpus=())
    found = {}
    print(f"{'process':16} {'forecast, GB':>12} {'measured':>9} {'ratio':>6}")
    for layout in ("lora", "full"):
        config = configuration(model, layout, mini_batch=rows)
        size = measure_folder(Path(model), LORA if layout == "lora" else None, "float32", joined=True)
        load = Workload(row=PROMPT + RESPONSE, sequences=sequences, policies=1, shared=PROMPT * (GROUP - 1) / GROUP)
        for process, count in zip(
            forecast_processes({model: (size, load)}, config, machine), (rows, sequences), strict=True
        ):
            real = measured(model, process.process, layout, count)
            name, ratio = f"{layout} {process.process}", process.bytes / real
            print(f"{name:16} {process.bytes / 1e9:12.2f} {real / 1e9:9.2f} {ratio:6.2f}", flush=True)
            found[name] = round(ratio, 3)
    return found


def paper() -> dict[str, Any]:
    """The table of models that fit on a GPU, with the forecast that `cotune doctor --gpu` makes."""
    import msgspec

    from benchmarks.qwen3 import QWEN3, qwen3_config
    from cotune.trainer.before.doctor.machine import examine_machine, gpu_of
    from cotune.trainer.before.doctor.memory import Workload, forecast_processes
    from cotune.trainer.before.doctor.model_size import measure
    from cotune.trainer.config.load import convert

    machine = examine_machine(Path())
    rows: list[list[str]] = []
    load = Workload(
        row=PAPER_PROMPT + PAPER_ANSWER, sequences=PAPER_ANSWERS, candidates=PAPER_ANSWERS // 32, policies=2
    )
    for model, shape in QWEN3.items():
        for kind, settings in PAPER_KINDS.items():
            config = convert(
                {
                    "model": model,
                    "engine": "transformers",
                    "roles": ["a", "b"],
                    "lora": {"rank": 16},
                    **settings,
                    "learner": {"dtype": "bfloat16", **settings.get("learner", {})},  # type: ignore[dict-item]
                }
            )
            # A base of four bits computes PEFT's own layers.
            lora = None if kind == "all weights" else LORA
            joined = config.learner.quantize == "none"
            size = measure(qwen3_config(shape), lora, "bfloat16", joined=joined, device="cuda")
            row = [model, kind]
            for gigabytes in PAPER_GPUS:
                here = msgspec.structs.replace(machine, gpus=(gpu_of(gigabytes),))
                row.append(_what_fits(forecast_processes({model: (size, load)}, config, here)))
            print(" | ".join(row), flush=True)
            rows.append(row)
    return {"table": "doctor_paper", "columns": ["model", "", *(f"{size} GB" for size in PAPER_GPUS)], "rows": rows}


def long_rows() -> dict[str, Any]:
    """The memory of a learner whose longest row has `LONG_ROW` tokens, on a GPU of 80 GB."""
    from benchmarks.qwen3 import QWEN3, qwen3_config
    from cotune.trainer.before.doctor.machine import gpu_of
    from cotune.trainer.before.doctor.memory import Workload, learner_memory
    from cotune.trainer.before.doctor.model_size import measure
    from cotune.trainer.config.load import convert

    gpu = gpu_of(80)
    config = convert({"model": "m", "policies": "lora", "learner": {"dtype": "bfloat16"}})
    load = Workload(row=LONG_ROW, sequences=PAPER_ANSWERS, policies=2)
    rows: list[list[str]] = []
    for model, shape in QWEN3.items():
        size = measure(qwen3_config(shape), LORA, "bfloat16", joined=True, device="cuda")
        free, total = gpu.free_gb * 2**30, gpu.memory_gb * 2**30
        plan = learner_memory(size, config, load, device="cuda", free=free, total=total)
        kind = "layers computed again" if plan.checkpointed else "plain"
        row = [model, f"{plan.pass_tokens:,} tokens, {kind}", f"{plan.bytes / 1e9:.0f} GB"]
        print(" | ".join(row), flush=True)
        rows.append(row)
    return {"table": "doctor_long_rows", "columns": ["model", "a pass", "the learner takes"], "rows": rows}


def _what_fits(plan: Sequence[ProcessMemory]) -> str:
    """The tokens of a pass and the answers at once of a run; or how much memory is missing."""
    from cotune.trainer.before.doctor.memory import peak_of_device, shortages

    learner, sampler = plan
    if list(shortages(plan)):
        return f"{(peak_of_device(plan) - learner.free) / 1e9:.0f} GB too much"
    star = "*" if learner.checkpointed else ""
    return f"{learner.pass_tokens:,}{star}, {sampler.at_once}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--paper", action="store_true")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.paper:
        tables = [paper(), long_rows()]
        for table in tables:
            print(json.dumps(table))
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
