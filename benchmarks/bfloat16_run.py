"""Trains an example to its end in bfloat16, with the precision of a GPU on a CPU.

    python -m benchmarks.bfloat16_run plan_path --out build/bfloat16-plan-path
    python -m benchmarks.bfloat16_run word_problems --no-evaluation --out build/bfloat16-word-problems

The engine holds and computes everything in bfloat16, as on a GPU. The learner has bfloat16 weights and float32 adapters
under autocast. Logits are float32 on both sides: see `benchmarks.gap`. A publication whose gap is above `probe_bound`
ends the run. A stopped run can be continued.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.gap import compute_as_a_gpu
from cotune.integrations.models.folder.folder import locate_model, read_tokenizer
from cotune.integrations.models.transformers.sampler import TransformersSampler
from cotune.storage.metrics_file import read_metrics
from cotune.trainer.config.load import load_config
from cotune.trainer.train import resume, train
from examples.plan_path import demo as plan_path
from examples.word_problems import demo as word_problems
from examples.word_problems.tasks import make_tasks


async def open_engine(model: str) -> TransformersSampler:
    """The in-process engine, with a model that is in bfloat16 as a whole. A run opens it by its name."""
    folder = str(locate_model(model))
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return await TransformersSampler.open(network, host="thread", tokenizer=read_tokenizer(folder), threads=1)


def prepare_plan_path(out: Path) -> tuple[Path, Path, Path]:
    """Return the base model, the tasks and the settings of the example, which are those of its demo."""
    base = out / "base"
    if not base.exists():
        subprocess.run([sys.executable, "-m", plan_path.BASE, "--out", str(base)], check=True)
    return base, plan_path.write_tasks(out / "tasks.jsonl", 4096, plan_path.TRAIN_SEED), plan_path.CONFIG


def prepare_word_problems(out: Path) -> tuple[Path, Path, Path]:
    """Return the base model, the tasks and the settings of the example, which are those of its demo."""
    tasks = word_problems.write_tasks(out / "tasks.jsonl", make_tasks(word_problems.TRAINING))
    return word_problems.pretrained(), tasks, word_problems.CONFIG


EXAMPLES = {
    "plan_path": (plan_path.WORKFLOW, prepare_plan_path),
    "word_problems": (word_problems.WORKFLOW, prepare_word_problems),
}


def run_example(name: str, out: Path, *, evaluate: bool) -> Path:
    """Train an example, or continue its run. With `evaluate`, some steps end with an evaluation on held-out tasks.
    Returns the folder of the run."""
    run = out / "run"
    if run.exists():
        summary = resume(run)
    else:
        workflow, prepare = EXAMPLES[name]
        model, tasks, settings = prepare(out)
        in_bfloat16 = {"engine": "benchmarks.bfloat16_run:open_engine", "learner.dtype": "bfloat16"}
        held_out_tasks = None if evaluate else "none"
        config = load_config(settings, {"model": str(model), **in_bfloat16, "evaluation.tasks": held_out_tasks})
        summary = train(workflow, tasks, config, out=run)
    if not summary.finished:
        raise SystemExit("stopped; the same command continues")
    return run


def conclude(run: Path) -> None:
    """Print how the gap and the reward have changed over the run, and at last a line of JSON with these figures."""
    metrics = read_metrics(run)
    gaps = [figures["probe_gap_mean"] for step in metrics for figures in step["policies"].values()]
    print(f"{len(metrics)} steps, {len(gaps)} publications")
    print(f"gap of publications: mean {sum(gaps) / len(gaps):.4f}, largest {max(gaps):.4f}")
    rewards = [step["candidate_reward"] for step in metrics]
    print(f"reward of candidates: {rewards[0]:.3f} in the first step, {rewards[-1]:.3f} in the last")
    figures = {
        "steps": len(metrics),
        "publications": len(gaps),
        "mean_gap": sum(gaps) / len(gaps),
        "largest_gap": max(gaps),
        "first_reward": rewards[0],
        "last_reward": rewards[-1],
    }
    print(json.dumps(figures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example", choices=sorted(EXAMPLES))
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--no-evaluation", action="store_true", help="run no held-out tasks, to save time")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    compute_as_a_gpu()
    conclude(run_example(args.example, args.out, evaluate=not args.no_evaluation))


if __name__ == "__main__":
    main()
