"""Which candidate should go on in training: the best, a random one, or the first? On Plan-Path's team.

    python -m benchmarks.selection                                    # 3 seeds x 3 ways; hours on one core
    python -m benchmarks.selection --seeds 0 --steps 20 --tasks 300   # a reduced form

The states that a role is trained on are those that the selection leads to. A seed is a base model of its own; its three
runs start from it, train on the same tasks with AT-GRPO (K = 8, tree) and differ in `plan.select` alone. Each is
evaluated on the same fresh tasks with single samples at temperature 1 and 0, as a deployed team plays. A run's results
are appended to OUT/results.jsonl and not computed again under the same settings. The last line is JSON.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.kept_results import KeptResults, mean_share, over_seeds, run_parser, success_cells, train_once
from cotune.storage.metrics_file import read_metrics
from cotune.trainer.evaluation.evaluate import evaluate
from examples.ablation.plan_path import MAX_TOKENS, WORKFLOWS, base, grid

SELECTS = ("argmax", "sample", "first")
TRAIN_SEED, FRESH_SEED = 100, 900
console = Console(stderr=True)


def base_model(out: Path, seed: int, steps: int) -> Path:
    """The base model of a seed, built if it does not exist yet."""
    folder = out / f"seed{seed}" / f"base-{steps}"
    if not (folder / "tokenizer_config.json").is_file():
        console.print(f"seed {seed}: warming up a base model")
        base.build(folder, seed=seed, steps=steps)
    return folder


def trained(model: Path, select: str, seed: int, options: argparse.Namespace) -> Path:
    """The run of one seed and way, done, or resumed if it is not finished."""
    folder: Path = options.out / f"seed{seed}" / f"{select}-{options.steps}x{options.tasks_per_step}-{options.warm_up}"
    tasks = list(grid.make_tasks(options.steps * options.tasks_per_step, TRAIN_SEED + seed))
    settings = {
        "model": str(model),
        "steps": options.steps,
        "tasks_per_step": options.tasks_per_step,
        "seed": seed,
        "checkpoint_every": 10,
        "plan": {"kind": "tree", "k": 8, "select": select},
        "loss": {"clip_high": 0.28, "entropy": 0.03},
        "learner": {"lr": 3e-3, "betas": [0.9, 0.95]},
        "schedule": {"kind": "linear"},
        "sampling": {"max_tokens": MAX_TOKENS},
    }
    return train_once(folder, WORKFLOWS["team"], tasks, settings, options.steps, console)


def result(select: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train and evaluate; returns the training's own figures too."""
    model = base_model(options.out, seed, options.warm_up)
    run = trained(model, select, seed, options)
    fresh = list(grid.make_tasks(options.tasks, FRESH_SEED))
    report = evaluate(run, WORKFLOWS["team"], fresh, modes=("base", "trained"), max_tokens=MAX_TOKENS)
    coldest = evaluate(run, WORKFLOWS["team"], fresh, modes=("trained",), temperature=0.0, max_tokens=MAX_TOKENS)
    last = list(read_metrics(run))[-1]
    reached = {mode: sum(e.successes.values()) for mode, e in report.evaluations.items()}
    reached["greedy"] = sum(coldest.evaluations["trained"].successes.values())
    shown = {"path": last["outcome"].get("success"), "candidates": last["candidate_reward"]}
    return {"reached": reached, "last_step": shown}


def summary(results: Sequence[Mapping[str, Any]], tasks: int) -> dict[str, dict[str, Any]]:
    """By way: success of single samples and of greedy ones over all seeds, and the figures of the last step."""
    by_select: dict[str, dict[str, Any]] = {}
    for select in SELECTS:
        lines = [line for line in results if line["select"] == select]
        if not lines:
            continue
        by_select[select] = {
            **over_seeds(lines, tasks),
            "base": mean_share(lines, tasks, "base"),
            "greedy": mean_share(lines, tasks, "greedy"),
            "path_in_last_step": round(sum(line["last_step"]["path"] or 0.0 for line in lines) / len(lines), 4),
        }
    return by_select


def table(rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """The ways side by side."""
    shown = Table(title="Plan-Path: share of fresh tasks whose goal was reached, by what went on in training")
    for title in ("select", "single samples", "by seed", "greedy", "base", "selected path, last step"):
        shown.add_column(title)
    for select, row in rows.items():
        shares = (f"{row[name]:.1%}" for name in ("greedy", "base", "path_in_last_step"))
        shown.add_row(select, *success_cells(row), *shares)
    return shown


def main() -> None:
    """Do the runs that are not recorded yet, and print all results."""
    parser = run_parser(__doc__, "runs/selection")
    parser.add_argument("--steps", type=int, default=50, help="training steps (default: %(default)s)")
    parser.add_argument("--tasks-per-step", type=int, default=48)
    parser.add_argument("--tasks", type=int, default=1000, help="fresh tasks (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=base.STEPS, help="steps of warm-up (default: %(default)s)")
    options = parser.parse_args()
    results = KeptResults(options, "steps", "tasks_per_step", "tasks", "warm_up")
    for seed in map(int, options.seeds.split(",")):
        for select in SELECTS:
            if line := results.once(partial(result, select, seed, options), select=select, seed=seed):
                console.print(f"seed {seed}: {select} reached {line['reached']}")
    rows = summary(results.lines(), options.tasks)
    Console(width=130).print(table(rows))
    print(json.dumps({"settings": results.settings, "selects": rows}))


if __name__ == "__main__":
    main()
