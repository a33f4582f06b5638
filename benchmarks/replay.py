"""How much does a team learn from outcomes alone? On Plan-Path, at an equal number of sampled tokens.

    python -m benchmarks.replay                                        # 3 seeds x 3 ways; hours on one core
    python -m benchmarks.replay --seeds 0 --steps 20 --tasks 300       # a reduced form

`tree` has scorers (AT-GRPO, K = 8); `dr_mas` (8 episodes a task) and `replay` (4 forks an episode, K = 4) know only the
outcome of an episode. A seed is a base model of its own, from which its three runs start. The tokens of a way's step
are measured in two steps, and its tasks per step are set so that all ways sample as many tokens as `tree` does with
--tasks-per-step; the tokens that they did sample are reported. Each is evaluated on the same fresh tasks with single
samples at temperature 1. A run's results are appended to OUT/results.jsonl and not computed again under the same
settings. The last line is JSON.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.kept_results import KeptResults, mean_share, over_seeds, run_parser, success_cells, train_once
from benchmarks.selection import base_model
from cotune.episodes.workflows import Workflow
from cotune.storage.metrics_file import read_metrics
from cotune.storage.sqlite_store import SqliteStore
from cotune.trainer.evaluation.evaluate import evaluate
from examples.ablation.plan_path import MAX_TOKENS, WORKFLOWS, base, grid

TRAIN_SEED, FRESH_SEED = 100, 900
PROBE_STEPS = 2
SCORED: Workflow = WORKFLOWS["team"].cotune
OUTCOME = dataclasses.replace(SCORED, scorers={})
WAYS: Mapping[str, tuple[Workflow, Mapping[str, Any]]] = {
    "tree": (SCORED, {"plan": {"kind": "tree", "k": 8}}),
    "dr_mas": (OUTCOME, {"plan": {"kind": "independent", "k": 8}}),
    "replay": (OUTCOME, {"plan": {"kind": "replay", "k": 4}, "replay": {"budget": 4}}),
}
_SAMPLED = """
    SELECT coalesce(sum(completion_tokens), 0) FROM calls JOIN episodes ON episodes.id = calls.episode
    WHERE phase = 'train' AND json_extract(calls.body, '$.replayed') IS NULL"""
console = Console(stderr=True)


def trained(model: Path, way: str, seed: int, steps: int, tasks_per_step: int, folder: Path) -> Path:
    """The run of one seed and way, done, or resumed if it is not finished."""
    flow, plan = WAYS[way]
    tasks = list(grid.make_tasks(steps * tasks_per_step, TRAIN_SEED + seed))
    settings = {
        "model": str(model),
        "steps": steps,
        "tasks_per_step": tasks_per_step,
        "seed": seed,
        "checkpoint_every": 10,
        "loss": {"clip_high": 0.28, "entropy": 0.03},
        "learner": {"lr": 3e-3, "betas": [0.9, 0.95]},
        "schedule": {"kind": "linear"},
        "sampling": {"max_tokens": MAX_TOKENS},
        **plan,
    }
    return train_once(folder, flow, tasks, settings, steps, console)


def sampled_tokens(run: Path) -> int:
    """Tokens that the policies have sampled in the steps of a run, without answers from the record."""
    with SqliteStore.open(run, read_only=True) as store:
        ((tokens,),) = store.rows(_SAMPLED)
    return int(tokens)


def tasks_per_step(model: Path, way: str, seed: int, options: argparse.Namespace) -> int:
    """How many tasks a step of this way needs to sample as many tokens as `tree`."""
    if way == "tree":
        return int(options.tasks_per_step)
    few = max(4, options.tasks_per_step // 4)
    tokens = {}
    for name in ("tree", way):
        folder = options.out / f"seed{seed}" / f"probe-{name}-{few}"
        tokens[name] = sampled_tokens(trained(model, name, seed, PROBE_STEPS, few, folder))
    return max(1, round(options.tasks_per_step * tokens["tree"] / tokens[way]))


def result(way: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train and evaluate."""
    model = base_model(options.out, seed, options.warm_up)
    count = tasks_per_step(model, way, seed, options)
    folder = options.out / f"seed{seed}" / f"{way}-{options.steps}x{count}-{options.warm_up}"
    run = trained(model, way, seed, options.steps, count, folder)
    fresh = list(grid.make_tasks(options.tasks, FRESH_SEED))
    report = evaluate(run, OUTCOME, fresh, modes=("base", "trained"), max_tokens=MAX_TOKENS)
    lines = list(read_metrics(run))
    return {
        "tasks_per_step": count,
        "tokens": sampled_tokens(run),
        "rows": sum(line["rows"] for line in lines),
        "reached": {mode: sum(e.successes.values()) for mode, e in report.evaluations.items()},
        "diverged": sum(line["replay"].get("diverged", 0) for line in lines),
        "curve": [round(line["outcome"].get("success", 0.0), 3) for line in lines],
    }


def summary(results: Sequence[Mapping[str, Any]], tasks: int) -> dict[str, dict[str, Any]]:
    """By way: success of single samples over all seeds, tokens sampled, rows trained on."""
    by_way: dict[str, dict[str, Any]] = {}
    for way in WAYS:
        lines = [line for line in results if line["way"] == way]
        if not lines:
            continue
        by_way[way] = {
            **over_seeds(lines, tasks),
            "base": mean_share(lines, tasks, "base"),
            "tokens": round(sum(line["tokens"] for line in lines) / len(lines)),
            "rows": round(sum(line["rows"] for line in lines) / len(lines)),
        }
    return by_way


def table(rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """The ways side by side."""
    shown = Table(title="Plan-Path: share of fresh tasks whose goal was reached, single samples at temperature 1")
    for title in ("way", "success", "by seed", "base", "sampled tokens", "rows trained on"):
        shown.add_column(title)
    for way, row in rows.items():
        counts = f"{row['tokens']:,}", f"{row['rows']:,}"
        shown.add_row(way, *success_cells(row), f"{row['base']:.1%}", *counts)
    return shown


def main() -> None:
    """Do the runs that are not recorded yet, and print all results."""
    parser = run_parser(__doc__, "runs/replay", WAYS)
    parser.add_argument("--steps", type=int, default=50, help="training steps (default: %(default)s)")
    parser.add_argument("--tasks-per-step", type=int, default=48, help="of `tree` (default: %(default)s)")
    parser.add_argument("--tasks", type=int, default=1000, help="fresh tasks (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=base.STEPS, help="steps of warm-up (default: %(default)s)")
    options = parser.parse_args()
    results = KeptResults(options, "steps", "tasks_per_step", "tasks", "warm_up")
    for seed in map(int, options.seeds.split(",")):
        for way in options.ways.split(","):
            if line := results.once(partial(result, way, seed, options), way=way, seed=seed):
                console.print(f"seed {seed}: {way} reached {line['reached']} with {line['tokens']:,} tokens")
    rows = summary(results.lines(), options.tasks)
    Console(width=130).print(table(rows))
    print(json.dumps({"settings": results.settings, "ways": rows}))


if __name__ == "__main__":
    main()
