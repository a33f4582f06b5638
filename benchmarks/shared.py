"""Base weights that the sampler's process and the learner have in common: memory-mapped from the same safetensors.

    python -m benchmarks.shared --model MODEL

Resident sizes of a learner of a LoRA that has made a pass and of a sampler that has answered, on the CPU in fp32, and
how much of each are pages of the model's file, which the machine has once. The last line is JSON: GB of both processes,
were nothing in common, and as it is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

from benchmarks.memory import make_rows
from cotune.algorithms.recipes import LossSpec
from cotune.integrations.models.folder.folder import locate_model
from cotune.integrations.models.transformers.sampler import TransformersSampler
from cotune.records.policies import UNTRAINED, LoraSpec, policies_for
from cotune.sampling.protocol import SamplingParams
from cotune.trainer.learner.local import LocalLearner
from tests.trainer.learner.forced import ForcedSettings


def sizes(pid: int | str) -> tuple[float, float]:
    """GB that a process has in memory, and the part of them in pages of a safetensors file."""
    resident = mapped = 0.0
    of_weights = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        field, _, value = line.partition(":")
        if " " in field:  # the head of a mapping, which ends with its file
            of_weights = line.endswith(".safetensors")
        elif field == "Rss":
            size = int(value.split()[0]) * 1024 / 1e9
            resident += size
            mapped += size * of_weights
    return resident, mapped


async def measure(model: str) -> dict[str, float]:
    folder = str(locate_model(model))
    settings = ForcedSettings(device="cpu", threads=1, micro_batch_tokens=128)
    sampler = await TransformersSampler.open(folder, threads=1, prefix_cache=0)
    try:
        await sampler.sample((1, 2, 3), 1, SamplingParams(max_tokens=2), UNTRAINED)
        learner = LocalLearner.open(folder, policies_for("lora", ["a"], LoraSpec(rank=16)), settings, LossSpec())
        learner.logprobs("a", make_rows(folder, 8)[:2])
        assert sampler._host is not None
        learning, sampling = sizes("self"), sizes(sampler._host._process.pid)
    finally:
        await sampler.aclose()
    print(f"{'':10} {'resident':>9} {'of the file':>12}")
    for name, (resident, mapped) in {"learner": learning, "sampler": sampling}.items():
        print(f"{name:10} {resident:6.2f} GB {mapped:9.2f} GB")
    common = min(learning[1], sampling[1])
    return {"apart": round(learning[0] + sampling[0], 2), "together": round(learning[0] + sampling[0] - common, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    print(json.dumps({"gb": asyncio.run(measure(parser.parse_args().model))}))


if __name__ == "__main__":
    main()
