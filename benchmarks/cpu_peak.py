"""The memory of a learner on a CPU: the forecast of `cotune doctor`, and the peak of a process that makes the update.

    python -m benchmarks.cpu_peak [--rows 8] [--row 2048] [--updates 2] [--dtype float32]

SmolLM2-135M-Instruct with a LoRA, and rows that share nothing, so that no token is computed once for several. The last
line is JSON. It takes minutes of a processor, and as much memory as it measures.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import msgspec

from benchmarks.peak_memory import peak_memory
from cotune.algorithms.catalogue import recipe
from cotune.algorithms.samples import TrainRow
from cotune.integrations.models.folder.folder import locate_model
from cotune.records.policies import LoraSpec, policies_for
from cotune.trainer.before.doctor.machine import examine_machine
from cotune.trainer.before.doctor.memory import Workload, learner_memory
from cotune.trainer.before.doctor.model_size import measure_folder
from cotune.trainer.config.load import convert
from cotune.trainer.learner.local import LocalLearner
from examples.word_problems.demo import pretrained

ANSWER = 32
LORA = LoraSpec(rank=16)


def make_rows(count: int, length: int, vocabulary: int) -> list[TrainRow]:
    """Rows of `length` tokens, of which no two begin alike."""
    rows: list[TrainRow] = []
    for number in range(count):
        row = TrainRow(
            id=str(number),
            role="a",
            prompt_ids=(number, *((number + place * place) % vocabulary for place in range(1, length - ANSWER))),
            response_ids=tuple(range(ANSWER)),
            logprobs=(-1.0,) * ANSWER,
            advantage=1.0 if number % 2 else -1.0,
        )
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--row", type=int, default=2048, help="tokens of a row (default: %(default)s)")
    parser.add_argument("--updates", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float32"])
    options = parser.parse_args()

    folder = str(locate_model(pretrained()))
    learner_settings = {"lr": 1e-4, "dtype": options.dtype, "mini_batch": options.rows}
    config = convert({"model": folder, "policies": "lora", "lora": {"rank": 16}, "learner": learner_settings})
    size = measure_folder(Path(folder), LORA, options.dtype, joined=True)
    machine = msgspec.structs.replace(examine_machine(Path()), gpus=())
    plan = learner_memory(
        size,
        config,
        Workload(row=options.row, sequences=1, policies=1),
        device="cpu",
        free=machine.free_memory_gb * 2**30,
        total=machine.memory_gb * 2**30,
    )
    for part, taken in plan.parts.items():
        print(f"{part:45} {taken / 1e9:5.2f} GB")

    learner = LocalLearner.open(folder, policies_for("lora", ["a"], LORA), config.learner, recipe("at_grpo").loss)
    rows = make_rows(options.rows, options.row, size.vocabulary)
    for _ in range(options.updates):
        learner.update("a", rows)
        print(f"after an update: {peak_memory() / 1e9:.2f} GB", flush=True)
    measured = peak_memory()
    figures = {"forecast_gb": plan.bytes / 1e9, "measured_gb": measured / 1e9, "ratio": plan.bytes / measured}
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
