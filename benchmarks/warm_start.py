"""Do recordings of a stronger model halve a reinforcement run? On the tool-using example.

    python -m benchmarks.warm_start                          # 3 seeds
    python -m benchmarks.warm_start --seeds 0 --steps 8      # a reduced form

A scripted provider behind a real HTTP server is recorded on 500 tasks. Each seed is a base model of its own. One run
learns from there by reinforcement alone (`rl`: AT-GRPO, --steps steps), another from the recordings (`sft`) and then by
reinforcement in half as many steps (`warm`), on the same tasks with the same settings. All are evaluated on the same
fresh tasks with single samples at temperature 1. A seed's results are appended to OUT/results.jsonl and not computed
again under the same settings; runs are resumed. The last line is JSON.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import tomllib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.kept_results import KeptResults, over_seeds, run_parser, success_cells, train_once
from cotune.storage.metrics_file import read_metrics
from cotune.trainer.evaluation.evaluate import evaluate
from examples.stages import run_cotune
from examples.tool_agent import clerk_base
from examples.tool_agent.distill import CONFIG, WORKFLOW, write_tasks
from examples.tool_agent.provider import serving
from examples.tool_agent.shop import make_tasks

RECORDED, FRESH_SEED = 500, 900
TRAIN_SEED = 100
ROWS = {"base": "base", "sft": "sft, no reinforcement", "rl": "reinforcement alone", "warm": "sft, then half the steps"}
console = Console(stderr=True)


def settings(model: Path, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Those of the example, with a policy of its own for its one role."""
    table = tomllib.loads(Path(CONFIG).read_text())
    changes = {"model": str(model), "policies": "shared", "seed": seed, "tasks_per_step": options.tasks_per_step}
    return {**table, **changes}


def result(seed: int, traced: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The runs of a seed, and their success."""
    folder = options.out / f"seed{seed}"
    model = folder / "base"
    if not (model / "tokenizer_config.json").is_file():
        clerk_base.build(model, seed=seed)
    table = settings(model, seed, options)
    tasks = list(make_tasks(options.steps * options.tasks_per_step, TRAIN_SEED + seed))
    form = f"{options.steps}x{options.tasks_per_step}"

    def run(name: str, steps: int, tasks: Sequence[Any] | None, table: Mapping[str, Any]) -> Path:
        return train_once(folder / name, WORKFLOW, tasks, {**table, "steps": steps}, steps, console)

    records = {"path": str(traced), "min_reward": 1.0}
    learned = {**table, "recipe": "sft", "records": records, "tasks_per_step": 32}
    sft = run(f"sft-{options.sft_steps}", options.sft_steps, None, learned)
    runs = {
        "sft": sft,
        "warm": run(f"warm-{form}", options.steps // 2, tasks, {**table, "init": str(sft)}),
        "rl": run(f"rl-{form}", options.steps, tasks, table),
    }
    fresh, reached = list(make_tasks(options.tasks, FRESH_SEED)), {}
    for name, path in runs.items():
        modes = ("base", "trained") if name == "sft" else ("trained",)
        for mode, evaluation in evaluate(path, WORKFLOW, fresh, modes=modes).evaluations.items():
            reached["base" if mode == "base" else name] = sum(evaluation.successes.values())
    curves = {name: [line["outcome"]["success"] for line in read_metrics(runs[name])] for name in ("rl", "warm")}
    return {"reached": reached, "best_of_8": curves}


def main() -> None:
    """Do the runs that are not recorded yet, and print all results."""
    parser = run_parser(__doc__, "runs/warm_start")
    parser.add_argument("--steps", type=int, default=30, help="of reinforcement alone (default: %(default)s)")
    parser.add_argument("--sft-steps", type=int, default=48, help="three times all recordings (default: %(default)s)")
    parser.add_argument("--tasks-per-step", type=int, default=32, help="(default: %(default)s)")
    parser.add_argument("--tasks", type=int, default=500, help="fresh tasks (default: %(default)s)")
    options = parser.parse_args()
    results = KeptResults(options, "steps", "sft_steps", "tasks_per_step", "tasks")
    traced = options.out / "traced"
    if not (traced / "records.db").is_file():
        listed = write_tasks(options.out / "recorded.jsonl", RECORDED, 0)
        with serving() as url:
            run_cotune(url, "trace", WORKFLOW, "--tasks", listed, "--out", str(traced))
    for seed in map(int, options.seeds.split(",")):
        if line := results.once(partial(result, seed, traced, options), seed=seed):
            console.print(f"seed {seed}: {line['reached']} of {options.tasks}")
    lines = results.lines()
    rows = {name: over_seeds(lines, options.tasks, name) for name in ROWS}
    table = Table(title="Tool-using example: share of fresh tasks solved, single samples at temperature 1")
    for title in ("policies", "success", "by seed"):
        table.add_column(title)
    for name, row in rows.items():
        table.add_row(ROWS[name], *success_cells(row))
    Console(width=130).print(table)
    print(json.dumps({"settings": results.settings, "rows": rows}))


if __name__ == "__main__":
    main()
