"""Memory and pages of updates of a model: in bfloat16, in fp32, under a limit, with every tensor's pages asked for
anew, and with torch's own products too.

    python -m benchmarks.memory --model MODEL [--rows 256] [--limit 2GiB]

LoRA of rank 16, groups of 8 rows with a prompt of 64 and answers of 32 random tokens; each row of the table is a
process of its own, which makes three updates: the peak is of all, times are of the last, `pages` are those that it
had the system hand out. The last line is JSON: peak_gb by setting, and the CPU and the seconds of each over those of
the last, which is how an update was before pages were kept and oneDNN was asked.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import time
from typing import Any

from benchmarks.peak_memory import peak_memory
from cotune.algorithms.samples import TrainRow
from tests.trainer.learner.forced import ForcedSettings

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


def measure(model: str, rows: int, settings: dict[str, Any], without: list[str]) -> dict[str, float]:
    """Updates in this process: tokens of a pass, seconds, CPU seconds, pages, and the largest resident size in GB.
    `without` "pages" that are kept, or oneDNN's "products"."""
    from cotune.algorithms.catalogue import recipe
    from cotune.integrations.models import float32
    from cotune.integrations.models.folder.folder import locate_model
    from cotune.records.policies import LoraSpec, policies_for
    from cotune.trainer.learner.local import LocalLearner
    from cotune.trainer.learner.memory import pass_size

    if "pages" in without:
        pass_size._KEEP = pass_size._ANEW
    if "products" in without:
        float32.prefers_onednn = lambda: False
    folder = str(locate_model(model))
    made = make_rows(folder, rows)
    learner = LocalLearner.open(
        folder,
        policies_for("lora", ["a"], LoraSpec(rank=16)),
        ForcedSettings(lr=1e-4, mini_batch=rows, device="cpu", **settings),
        recipe("at_grpo").loss,
    )
    for _ in range(3):
        before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        metrics = learner.update("a", made)
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    return {
        "tokens": metrics["pass_tokens"],
        "seconds": seconds,
        "user": after.ru_utime - before.ru_utime,
        "system": after.ru_stime - before.ru_stime,
        "pages": after.ru_minflt - before.ru_minflt,
        "peak_gb": peak_memory() / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--limit", default="2GiB")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--without", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.model, args.rows, json.loads(args.one), args.without.split(","))))
        return
    exact: dict[str, Any] = {"dtype": "float32"}
    cases: dict[str, tuple[dict[str, Any], str]] = {
        "in bfloat16": ({"dtype": "bfloat16"}, ""),
        "in fp32": (exact, ""),
        f"fp32, {args.limit}": ({**exact, "memory": args.limit}, ""),
        "fp32, pages anew": (exact, "pages"),
        "fp32, as before": (exact, "pages,products"),
    }
    results = {}
    columns = f"{'seconds':>8} {'user, s':>8} {'system, s':>9} {'pages':>9}"
    print(f"{'setting':24} {'tokens of a pass':>16} {'peak, GB':>9} {columns}")
    for name, (settings, without) in cases.items():
        command = [sys.executable, "-m", "benchmarks.memory", "--model", args.model, "--rows", str(args.rows)]
        command += ["--one", json.dumps(settings), "--without", without]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        row = results[name] = json.loads(done.stdout.splitlines()[-1])
        figures = f"{row['seconds']:8.1f} {row['user']:8.1f} {row['system']:9.1f} {row['pages']:9,.0f}"
        print(f"{name:24} {row['tokens']:16,.0f} {row['peak_gb']:9.2f} {figures}", flush=True)
    last = list(results.values())[-1]
    ratios = {
        name: {
            "cpu": round((row["user"] + row["system"]) / (last["user"] + last["system"]), 2),
            "seconds": round(row["seconds"] / last["seconds"], 2),
        }
        for name, row in results.items()
    }
    print(json.dumps({"peak_gb": {name: round(row["peak_gb"], 2) for name, row in results.items()}, "ratios": ratios}))


if __name__ == "__main__":
    main()
