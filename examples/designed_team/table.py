"""Compare fixed and designed teams over seeds, untrained and trained, on the same held-out tasks.

    python -m examples.designed_team.table                        # 5 seeds x 3 runs
    python -m examples.designed_team.table --seeds 0 --steps 4    # a reduced form

All runs have the same base model and number of steps; seeds decide tasks, order and samples. `designer` trains the
designer alone, `both` designer and executors in turn, each in half of the steps. As a control, `fixed` trains the
executors in a team of one agent, with as many executions. Runs lie in OUT and are not repeated. The last line is JSON.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")  # nothing is asked there: the policies answer

import argparse
import json
import time
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from rich.console import Console

from benchmarks.kept_results import KeptResults, run_parser, train_once
from cotune.reading.by_setting import interval_over_runs
from cotune.reading.evaluations import in_training
from cotune.trainer.config.load import read_toml
from examples.designed_team.base import build
from examples.designed_team.tasks import Team, make_tasks
from examples.designed_team.train import solve

CONFIG = Path(__file__).with_name("train.toml")
EXECUTIONS = 4
"""N: how often each design is carried out in training. In evaluations it is carried out once."""
TASKS = 200
HELD_OUT = 100
RUNS: dict[str, tuple[Team, ...]] = {
    "fixed": ("one agent",),
    "designer": ("designed",),
    "both": ("designed", "an agent each"),
}
"""The team that each run trains, and further teams that its policies play in held-out tasks."""
console = Console(stderr=True)


class Row(NamedTuple):
    """A line of the table: a team, and the run whose policies play in it, before its first or after its last step."""

    title: str
    team: Team
    run: str
    trained: bool


ROWS = {
    "one_agent": Row("fixed: one agent for all operations, untrained", "one agent", "fixed", False),
    "one_agent_trained": Row("the same, trained", "one agent", "fixed", True),
    "designed": Row("designed, untrained", "designed", "both", False),
    "designer_trained": Row("designed, designer trained", "designed", "designer", True),
    "both_trained": Row("designed, both trained in turn", "designed", "both", True),
    "agent_each": Row("fixed: an agent for each operation, untrained", "an agent each", "both", False),
    "agent_each_trained": Row("the same, played by the executors of the line above it", "an agent each", "both", True),
}


def settings_of(run: str, steps: int) -> dict[str, Any]:
    """The settings of a run: train.toml, with the policies that the run trains."""
    settings = {**read_toml(CONFIG), "steps": steps}
    designer, executor = settings["policy"]
    quarter = steps // 4
    designer["train"] = f"1:{quarter},{2 * quarter + 1}:{3 * quarter}"
    executor["train"] = f"{quarter + 1}:{2 * quarter},{3 * quarter + 1}:"
    if run != "both":
        del designer["train"], executor["train"]
        untrained = executor if run == "designer" else designer
        untrained["kind"] = "frozen"
    return settings


def result(seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train all runs of a seed. Returns the success on held-out tasks by row, and the seconds of each run."""
    base: Path = options.out / "base"
    if not (base / "tokenizer_config.json").is_file():
        build(base)
    seconds: dict[str, float] = {}
    success: dict[tuple[str, Team, bool], float] = {}
    for run, teams in RUNS.items():
        # All teams do the same held-out work.
        held_out = options.out / f"held_out_{run}.jsonl"
        tasks = [task for team in teams for task in make_tasks(HELD_OUT, seed=900, team=team)]
        held_out.write_text("".join(json.dumps(task) + "\n" for task in tasks))
        settings = settings_of(run, options.steps) | {
            "model": str(base),
            "seed": seed,
            "evaluation": {"tasks": str(held_out), "every": options.steps},
            "engine_args": {"host": "thread"},  # this process samples: starting another one takes longer than a run
        }
        folder = options.out / f"{run}-{seed}-{options.steps}"
        started = time.process_time()
        train_once(folder, solve, make_tasks(TASKS, 100 + seed, EXECUTIONS, teams[0]), settings, options.steps, console)
        seconds[run] = round(time.process_time() - started, 1)
        for report in in_training(folder):
            for mode, evaluation in report.evaluations.items():
                for evaluated in teams:
                    values = [value for task, value in evaluation.successes.items() if task.startswith(evaluated)]
                    success[run, evaluated, mode == "trained"] = fmean(values)
    rows = {name: success[row.run, row.team, row.trained] for name, row in ROWS.items()}
    console.print(f"seed {seed}: {rows}, seconds of processor time: {seconds}")
    return {"success": rows, "seconds": seconds}


def main() -> None:
    """Make the runs that are not recorded yet, and print all results."""
    parser = run_parser(__doc__, "runs/designed_team")
    parser.set_defaults(seeds="0,1,2,3,4")
    parser.add_argument("--steps", type=int, default=80, help="4 or more (default: %(default)s)")
    options = parser.parse_args()
    results = KeptResults(options, "steps")
    for seed in map(int, options.seeds.split(",")):
        results.once(partial(result, seed, options), seed=seed)

    lines = sorted(results.lines(), key=lambda line: line["seed"])
    table: dict[str, Any] = {}
    print("| team | success | 95% over seeds | by seed |\n|---|---|---|---|")
    for name, row in ROWS.items():
        by_seed = [line["success"][name] for line in lines]
        mean = interval_over_runs(by_seed)
        table[name] = {"success": mean.mean, "low": mean.low, "high": mean.high, "by_seed": by_seed}
        bounds = "-" if mean.low is None or mean.high is None else f"{mean.low:.0%} to {mean.high:.0%}"
        print(f"| {row.title} | {mean.mean:.0%} | {bounds} | {', '.join(f'{value:.0%}' for value in by_seed)} |")
    print(json.dumps({"settings": results.settings, "seeds": [line["seed"] for line in lines], "rows": table}))


if __name__ == "__main__":
    main()
