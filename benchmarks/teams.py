"""How much does a separate base, rate or time of training improve a role? On Plan-Path's team, at equal sampled tokens.

    python -m benchmarks.teams                                        # 3 seeds x 4 ways; hours on one core
    python -m benchmarks.teams --seeds 0 --tokens 20000 --tasks 200   # a reduced form

The navigator plans and the driver executes; each has a LoRA, trained with AT-GRPO (K = 8, tree). `one_base`: both on a
base of 0.3M parameters, both at the rate 3e-3. `two_bases`: the navigator on a base of 1.3M parameters, warmed up on
the same demonstrations. `two_rates`: the driver, which has more to learn, at twice the rate, the navigator at half.
`alternate`: the navigator alone is trained for four steps, then the driver, twice, then both. A run continues until it
has sampled the tokens, all candidates counted. Evaluated on fresh tasks at temperature 1. Runs lie in OUT/seedN and are
resumed; results are appended to OUT/results.jsonl and not computed again. The last line is JSON.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.kept_results import KeptResults, mean_share, over_seeds, run_parser, success_cells, train_once
from cotune.storage.metrics_file import read_metrics
from cotune.storage.sqlite_store import SqliteStore
from cotune.trainer.evaluation.evaluate import evaluate
from cotune.trainer.train import resume
from examples.ablation.plan_path import MAX_TOKENS, WORKFLOWS, base, grid

TRAIN_SEED, FRESH_SEED = 100, 900
LR = 3e-3
STEPS = 17
"""Steps of a run at least: both roles have had two turns in `alternate` then, and are trained together from here on."""
TASKS = 1536
"""Tasks of training."""
LARGE = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 3}
WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "one_base": {},
    "two_bases": {"navigator": {"model": "large"}},
    "two_rates": {"navigator": {"lr": LR / 2}, "driver": {"lr": LR * 2}},
    "alternate": {"navigator": {"train": f"1:4,9:12,{STEPS}:"}, "driver": {"train": "5:8,13:"}},
}
"""The settings that each role's policy does not share."""
console = Console(stderr=True)


def base_model(name: str, seed: int, options: argparse.Namespace) -> Path:
    """The small or the large base of a seed, built if it does not exist yet."""
    folder: Path = options.out / f"seed{seed}" / f"{name}-{options.warm_up}"
    if not (folder / "tokenizer_config.json").is_file():
        console.print(f"seed {seed}: warming up the {name} base")
        base.build(folder, seed=seed, steps=options.warm_up, **(LARGE if name == "large" else {}))
    return folder


def sampled(run: Path) -> int:
    """Tokens of all candidates that a run has sampled in training."""
    with SqliteStore.open(run, read_only=True) as store:
        of_training = "episode IN (SELECT id FROM episodes WHERE phase = 'train')"
        return int(store.rows(f"SELECT coalesce(sum(completion_tokens), 0) FROM calls WHERE {of_training}")[0][0])


def trained(way: str, seed: int, options: argparse.Namespace) -> Path:
    """The run of one way and seed that has sampled the tokens: done, resumed if it is not finished, or as it is."""
    run: Path = options.out / f"seed{seed}" / f"{way}-{options.tasks_per_step}-{options.warm_up}"
    tasks = list(grid.make_tasks(TASKS, TRAIN_SEED + seed))
    policies = []
    for role in ("navigator", "driver"):
        changes = dict(WAYS[way].get(role, {}))
        if "model" in changes:
            changes["model"] = str(base_model(changes["model"], seed, options))
        policies.append({"name": role, "roles": [role], "lora": {"rank": 16}, **changes})
    settings = {
        "model": str(base_model("small", seed, options)),
        "policy": policies,
        "steps": STEPS,
        "tasks_per_step": options.tasks_per_step,
        "concurrency": 64,
        "seed": seed,
        "plan": {"kind": "tree", "k": 8},
        "loss": {"clip_high": 0.28, "entropy": 0.03},
        "learner": {"lr": LR, "betas": [0.9, 0.95]},
        "sampling": {"max_tokens": MAX_TOKENS},
    }
    train_once(run, WORKFLOWS["team"], tasks, settings, STEPS, console)
    while (so_far := sampled(run)) < options.tokens:
        done = sum(1 for _ in read_metrics(run))
        steps = done + math.ceil((options.tokens - so_far) * done / so_far)
        if not resume(run, workflow=WORKFLOWS["team"], tasks=tasks, changes={"steps": steps}, console=console).finished:
            raise SystemExit(f"{run}: stopped; the same command continues it")
    return run


def result(way: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train, evaluate, and say how long the training was."""
    run = trained(way, seed, options)
    fresh = list(grid.make_tasks(options.tasks, FRESH_SEED))
    report = evaluate(run, WORKFLOWS["team"], fresh, modes=("base", "trained"), max_tokens=MAX_TOKENS)
    lines = list(read_metrics(run))
    return {
        "reached": {mode: sum(e.successes.values()) for mode, e in report.evaluations.items()},
        "steps": len(lines),
        "tokens": sampled(run),
        "rows": sum(line["rows"] for line in lines),
        "update_seconds": round(sum(line["seconds"]["update"] for line in lines), 1),
    }


def summary(results: Sequence[Mapping[str, Any]], tasks: int) -> dict[str, dict[str, Any]]:
    """By way: success over all seeds, before and after, and means of the rest."""
    rows: dict[str, dict[str, Any]] = {}
    for way in WAYS:
        lines = [line for line in results if line["way"] == way]
        if lines:
            means = {name: sum(line[name] for line in lines) / len(lines) for name in ("steps", "tokens", "rows")}
            rows[way] = {**over_seeds(lines, tasks), "base": mean_share(lines, tasks, "base"), **means}
    return rows


def table(rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """The ways side by side."""
    shown = Table(title="Plan-Path: share of fresh tasks whose goal was reached, at equal sampled tokens")
    for title in ("way", "trained", "by seed", "untrained", "steps", "tokens", "rows trained on"):
        shown.add_column(title)
    for way, row in rows.items():
        counts = (f"{row[name]:,.0f}" for name in ("steps", "tokens", "rows"))
        shown.add_row(way, *success_cells(row), f"{row['base']:.1%}", *counts)
    return shown


def main() -> None:
    """Do the runs that are not recorded yet, and print all results."""
    parser = run_parser(__doc__, "runs/teams", WAYS)
    parser.add_argument("--tokens", type=int, default=150_000, help="sampled in training (default: %(default)s)")
    parser.add_argument("--tasks-per-step", type=int, default=32)
    parser.add_argument("--tasks", type=int, default=1000, help="fresh tasks (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=base.STEPS, help="steps of warm-up (default: %(default)s)")
    options = parser.parse_args()
    results = KeptResults(options, "tokens", "tasks_per_step", "tasks", "warm_up")
    for seed in map(int, options.seeds.split(",")):
        for way in options.ways.split(","):
            if line := results.once(partial(result, way, seed, options), way=way, seed=seed):
                console.print(f"seed {seed}: {way} reached {line['reached']} of {options.tasks}")
    rows = summary(results.lines(), options.tasks)
    Console(width=130).print(table(rows))
    print(json.dumps({"settings": results.settings, "ways": rows}))


if __name__ == "__main__":
    main()
