"""Peak memory of one update of a model, as passes of so many tokens, of "auto", and under a limit.

    python -m benchmarks.memory --model MODEL [--rows 256] [--limit 2GiB]

LoRA of rank 16, fp32, groups of 8 rows with a prompt of 64 and answers of 32 random tokens; each row of the table is a
process of its own. The last line is JSON: peak_gb by setting.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from typing import Any

from cotune.algorithms.samples import TrainRow
from cotune.runtime.memory import peak_memory

GROUP, PROMPT, RESPONSE = 8, 64, 32


def make_rows(model: str, rows: int) -> list[TrainRow]:
    """Rows of random tokens of a model, in groups of 8 that share a prompt."""
    from transformers import AutoConfig

    vocabulary = AutoConfig.from_pretrained(model).vocab_size
    chance = random.Random(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(chance.randrange(vocabulary) for _ in range(count))

    prompts = [ids(PROMPT) for _ in range(rows // GROUP)]
    return [
        TrainRow(
            id=f"{group}.{member}",
            role="a",
            prompt_ids=prompt,
            response_ids=ids(RESPONSE),
            logprobs=(-10.0,) * RESPONSE,
            advantage=1.0 if member % 2 else -1.0,
        )
        for group, prompt in enumerate(prompts)
        for member in range(GROUP)
    ]


def measure(model: str, rows: int, settings: dict[str, Any]) -> dict[str, float]:
    """One update in this process: tokens of a pass, seconds, and the largest resident size in GB."""
    from cotune.algorithms.catalogue import recipe
    from cotune.integrations.models.folder.folder import locate_model
    from cotune.records.policies import LoraSpec, policies_for
    from cotune.trainer.config.learner import LearnerSettings
    from cotune.trainer.learner.local import LocalLearner

    folder = str(locate_model(model))
    made = make_rows(folder, rows)
    learner = LocalLearner.open(
        folder,
        policies_for("lora", ["a"], LoraSpec(rank=16)),
        LearnerSettings(lr=1e-4, mini_batch=rows, device="cpu", **settings),
        recipe("at_grpo").loss,
    )
    began = time.perf_counter()
    metrics = learner.update("a", made)
    seconds = time.perf_counter() - began
    peak = peak_memory() / 1e9
    return {"tokens": metrics["pass_tokens"], "seconds": seconds, "peak_gb": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--limit", default="2GiB")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.model, args.rows, json.loads(args.one))))
        return
    found = {}
    print(f"{'setting':24} {'tokens of a pass':>16} {'peak, GB':>9} {'seconds':>8}")
    for name, settings in {"auto": {}, "limit": {"memory": args.limit}}.items():
        command = [sys.executable, "-m", "benchmarks.memory", "--model", args.model, "--rows", str(args.rows)]
        done = subprocess.run([*command, "--one", json.dumps(settings)], stdout=subprocess.PIPE, text=True, check=True)
        row = json.loads(done.stdout.splitlines()[-1])
        label = f"learner.memory = {args.limit}" if settings else "defaults"
        print(f"{label:24} {row['tokens']:16,.0f} {row['peak_gb']:9.2f} {row['seconds']:8.1f}", flush=True)
        found[name] = round(row["peak_gb"], 2)
    print(json.dumps({"peak_gb": found}))


if __name__ == "__main__":
    main()
