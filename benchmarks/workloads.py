"""How much does training roles together teach a team, compared to one agent alone? On the workloads of the examples.

    python -m benchmarks.workloads --workload sokoban                       # three seeds
    python -m benchmarks.workloads --workload search --seeds 0 --steps 10   # a reduced form
    python -m benchmarks.workloads --workload noughts --tasks-per-step 1 --steps 25

A seed is a base model of its own, from which its trainings start: a single agent that does everything, the team with
one shared LoRA, the team with a LoRA per role, and, where the team has a tool, a single agent without it, as the
published ones are; each with the example's scorers and `small.toml` (AT-GRPO, tree; of the game `noughts` MARSHAL).
In a game no side is a team: the single agent learns by playing against random moves from either seat, the others by
playing against each other, and all are measured against random moves from either seat.
The tokens of a step are measured in two steps, and the tasks per step are set so that each training samples as many
tokens as the team with a LoRA per role does. Every row is evaluated on the same fresh tasks with single samples at
temperature 1. Results are appended to OUT/results.jsonl and not computed again under the same settings; a stopped
training is continued. The last line is JSON.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import importlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.kept_results import KeptResults, over_seeds, run_parser, success_cells, train_once
from benchmarks.replay import PROBE_STEPS, sampled_tokens
from cotune.storage.metrics_file import read_metrics
from cotune.trainer.config.load import load_config
from cotune.trainer.evaluation.evaluate import evaluate
from examples.workloads.code.tasks import SMALL
from examples.workloads.maths.tasks import SUMS

TRAIN_SEED, FRESH_SEED = 100, 900


class Workload(NamedTuple):
    """An example, and the names in it that differ."""

    example: str
    flows: Mapping[str, str] = {}
    tasks: Mapping[str, Any] = {}
    """The arguments of its `make_tasks` for tasks that a model of 0.3M parameters can learn."""
    opponent: Mapping[str, Any] = {}
    """Its further arguments for tasks that one agent plays alone, and for all that are evaluated."""


WORKLOADS: Mapping[str, Workload] = {
    "search": Workload("search"),
    "sokoban": Workload("sokoban"),
    "sudoku": Workload("sudoku", tasks={"empty": 4}),
    "maths": Workload("maths", tasks={"kinds": SUMS}),
    "code": Workload("code", tasks=SMALL),
    "plan_path": Workload("plan_path_checked", tasks={"size": 5}),
    "pictures": Workload("pictures", tasks={"size": 4}),
    "noughts": Workload(
        "self_play",
        flows={"solve": "noughts", "alone": "noughts"},
        tasks={"game": "noughts", "told": False},
        opponent={"chance": True},
    ),
}
TRAININGS: Mapping[str, tuple[str, str]] = {
    "by_role": ("solve", "lora"),
    "shared": ("solve", "shared"),
    "alone": ("alone", "shared"),
    "without_tool": ("without_tool", "shared"),
}
"""The workflow in the example's `train.py`, if it has that one, and the policies of each training."""
ROWS: Mapping[str, tuple[str, str]] = {
    "single agent without the tool, untrained": ("without_tool", "base"),
    "single agent without the tool, trained": ("without_tool", "trained"),
    "single agent, untrained": ("alone", "base"),
    "single agent, trained": ("alone", "trained"),
    "team, untrained": ("by_role", "base"),
    "team, trained, one shared policy": ("shared", "trained"),
    "team, trained, a policy per role": ("by_role", "trained"),
    "the same, swapped": ("by_role", "swapped"),
}
"""The training of a row, and the mode in which it is evaluated."""
console = Console(stderr=True)


class Trainings:
    """The trainings of one workload and seed."""

    def __init__(self, workload: str, seed: int, options: argparse.Namespace) -> None:
        self.workload, self.seed, self.options = workload, seed, options
        self.folder = options.out / workload / f"seed{seed}"
        self.kind = WORKLOADS[workload]

    def part(self, name: str) -> Any:
        """A module of the example."""
        return importlib.import_module(f"examples.workloads.{self.kind.example}.{name}")

    def base(self) -> Path:
        """The base model of the seed, built if it does not exist yet."""
        folder: Path = self.folder / "base"
        if not (folder / "tokenizer_config.json").is_file():
            console.print(f"{self.workload}, seed {self.seed}: warming up a base model")
            self.part("base").build(folder, seed=self.seed)
        return folder

    def flow(self, name: str) -> Any:
        """The workflow of a training; None if the example has none for it."""
        flow = TRAININGS[name][0]
        return getattr(self.part("train"), self.kind.flows.get(flow, flow), None)

    def tasks(self, count: int, seed: int, **settings: Any) -> list[Any]:
        """Tasks of the workload."""
        return list(self.part("tasks").make_tasks(count, seed, **self.kind.tasks, **settings))

    def run(self, name: str, steps: int, tasks_per_step: int) -> Path:
        """A training, done, or resumed if it is not finished."""
        flow, policies = self.flow(name), TRAININGS[name][1]
        folder: Path = self.folder / f"{name}-{steps}x{tasks_per_step}"
        opponent = self.kind.opponent if name == "alone" else {}
        tasks = self.tasks(steps * tasks_per_step, TRAIN_SEED + self.seed, **opponent)
        settings = {
            "model": str(self.base()),
            "policies": policies,
            "steps": steps,
            "tasks_per_step": tasks_per_step,
            "seed": self.seed,
            "checkpoint_every": 10,
        }
        config = load_config(Path("examples/workloads") / self.kind.example / "small.toml", settings)
        return train_once(folder, flow, tasks, config, steps, console)

    def tasks_per_step(self, name: str) -> int:
        """How many tasks a step of this training needs to sample as many tokens as the team with a policy per role."""
        whole = int(self.options.tasks_per_step)
        if name in ("by_role", "shared"):
            return whole
        few = max(1, whole // 4)
        tokens = {way: sampled_tokens(self.run(way, PROBE_STEPS, few)) for way in ("by_role", name)}
        return max(1, round(whole * tokens["by_role"] / tokens[name]))

    def result(self, name: str) -> dict[str, Any]:
        """Train and evaluate."""
        count = self.tasks_per_step(name)
        run = self.run(name, self.options.steps, count)
        fresh = self.tasks(self.options.tasks, FRESH_SEED, **self.kind.opponent)
        modes = tuple(mode for training, mode in ROWS.values() if training == name)
        report = evaluate(run, self.flow(name), fresh, modes=modes)
        return {
            "tasks_per_step": count,
            "tokens": sampled_tokens(run),
            "reached": {mode: sum(e.successes.values()) for mode, e in report.evaluations.items()},
            "curve": [round(line["outcome"].get("success", 0.0), 3) for line in read_metrics(run)],
        }


def summary(results: Sequence[Mapping[str, Any]], tasks: int) -> dict[str, dict[str, Any]]:
    """By row: success of single samples over all seeds, and the tokens sampled in training."""
    by_row: dict[str, dict[str, Any]] = {}
    for title, (training, mode) in ROWS.items():
        lines = [line for line in results if line["training"] == training]
        if lines:
            tokens = round(sum(line["tokens"] for line in lines) / len(lines)) if mode != "base" else 0
            by_row[title] = {**over_seeds(lines, tasks, mode), "tokens": tokens}
    return by_row


def table(workload: str, rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """The rows, one under the other."""
    shown = Table(title=f"{workload}: share of fresh tasks solved, single samples at temperature 1")
    for title in ("", "success", "by seed", "sampled tokens"):
        shown.add_column(title)
    for title, row in rows.items():
        shown.add_row(title, *success_cells(row), f"{row['tokens']:,}" if row["tokens"] else "")
    return shown


def main() -> None:
    """Do the runs that are not recorded yet, and print all results."""
    parser = run_parser(__doc__, "runs/workloads")
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--rows", default=",".join(TRAININGS), help="trainings, comma-separated (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=30, help="training steps (default: %(default)s)")
    parser.add_argument("--tasks-per-step", type=int, default=32, help="of the team (default: %(default)s)")
    parser.add_argument("--tasks", type=int, default=300, help="fresh tasks (default: %(default)s)")
    options = parser.parse_args()
    results = KeptResults(options, "steps", "tasks_per_step", "tasks")
    for seed in map(int, options.seeds.split(",")):
        trainings = Trainings(options.workload, seed, options)
        for name in options.rows.split(","):
            if trainings.flow(name) is None:
                continue
            compute = partial(trainings.result, name)
            if line := results.once(compute, workload=options.workload, training=name, seed=seed):
                console.print(f"seed {seed}: {name} reached {line['reached']} with {line['tokens']:,} tokens")
    rows = summary(results.lines(workload=options.workload), options.tasks)
    Console(width=130).print(table(options.workload, rows))
    print(json.dumps({"workload": options.workload, "settings": results.settings, "rows": rows}))


if __name__ == "__main__":
    main()
