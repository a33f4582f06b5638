"""How many sampled tokens does a run need when many of its tasks teach nothing? From outcomes, on two applications.

    nice -n 19 python -m benchmarks.refill                  # 3 seeds x 4 ways; hours on one core
    nice -n 19 python -m benchmarks.refill --seeds 0 --ways plain,both
    nice -n 19 python -m benchmarks.refill --task word_problems --seeds 0 --ways plain,adaptive --steps 8 \\
        --tasks-per-step 8 --pool 48 --tasks 40                 # SmolLM2-135M

Each run trains on the same pool of tasks. Plan-Path's has equal parts: usual ones, easy ones whose goal is one move
away, and locked ones that no answer solves; each seed has a base of its own. The word problems are the example's; the
pretrained model fails nearly all of them. A run knows only the outcome (dr_mas, K = 8).

`plain` takes the tasks in turn, `adaptive` sets `curriculum.pool`, `refill` a budget of one further task for each of a
step's own, and `both` does both.

Held-out tasks are usual ones; their success is the mean of the last WINDOW evaluations. The success of `plain` after
--steps steps, at N sampled tokens, is the mark; the others train until they reach it or have sampled N tokens. Tokens
of evaluations do not count. A run that was stopped is resumed, and its results are appended to OUT/results.jsonl. The
last line is JSON.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import cotune
from benchmarks.kept_results import KeptResults, run_parser
from benchmarks.selection import base_model
from cotune.storage.metrics_file import read_metrics
from cotune.storage.sqlite_store import SqliteStore
from cotune.trainer.train import resume, train
from examples.ablation.plan_path import MAX_TOKENS, grid, team
from examples.word_problems.demo import pretrained
from examples.word_problems.tasks import Problem, make_tasks
from examples.word_problems.train import solve

TRAIN_SEED, FRESH_SEED = 100, 900
EVERY = 2
"""Steps between evaluations."""
WINDOW = 3
WAYS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "both": {"curriculum": {"pool": "adaptive"}, "refill": {"budget": 1.0}},
    "adaptive": {"curriculum": {"pool": "adaptive"}},
    "refill": {"refill": {"budget": 1.0}},
}
_SAMPLED = """
    SELECT training_step, sum(completion_tokens) FROM calls JOIN episodes ON episodes.id = calls.episode
    WHERE phase = 'train' GROUP BY training_step ORDER BY training_step"""
console = Console(stderr=True)


@cotune.workflow
async def reach(task: Mapping[str, Any]) -> dict[str, float]:
    """The team of Plan-Path; only reaching the goal counts, and in a locked task nothing does."""
    outcome = await team.cotune.fn(task)
    return {"success": 0.0 if task.get("locked") else outcome["success"]}


def make_pool(count: int, seed: int, size: int) -> list[dict[str, Any]]:
    """Usual, easy and locked tasks, in equal parts."""
    rng = random.Random(f"pool {seed}")
    tasks = []
    for number, task in enumerate(grid.make_tasks(count, seed, size)):
        kind = ("usual", "easy", "locked")[number % 3]
        board = grid.grid_of(task)
        if kind == "easy":
            near = (grid.step(board.goal, move) for move in rng.sample(list(grid.MOVES), 4))
            task["start"] = list(next(cell for cell in near if board.free(cell)))
        tasks.append({**task, "id": f"{kind}-{task['id']}", "locked": kind == "locked"})
    return tasks


@cotune.workflow
async def solved(task: Problem) -> dict[str, float]:
    """The team of the word problems without its scorers."""
    return {"success": float(await solve.cotune.fn(task))}


@dataclass(frozen=True)
class Application:
    """An application to train: a workflow, its base model, its pool of tasks, its held-out tasks and its settings."""

    flow: Any
    model: Callable[[int, argparse.Namespace], Path]
    """Of a seed."""
    pool: Callable[[int, argparse.Namespace], Sequence[Any]]
    """Of a seed."""
    fresh: Callable[[argparse.Namespace], Sequence[Any]]
    settings: Mapping[str, Any]


APPLICATIONS = {
    "plan_path": Application(
        flow=reach,
        model=lambda seed, options: base_model(options.out, seed, options.warm_up),
        pool=lambda seed, options: make_pool(options.pool, TRAIN_SEED + seed, options.size),
        fresh=lambda options: list(grid.make_tasks(options.tasks, FRESH_SEED, options.size)),
        settings={
            "learner": {"lr": 3e-3, "betas": [0.9, 0.95]},
            "sampling": {"max_tokens": MAX_TOKENS},
        },
    ),
    "word_problems": Application(
        flow=solved,
        model=lambda seed, options: pretrained(),
        pool=lambda seed, options: make_tasks(options.pool, seed=TRAIN_SEED + seed),
        fresh=lambda options: make_tasks(options.tasks, seed=FRESH_SEED),
        settings={
            "lora": {"rank": 16},
            "learner": {"lr": 4e-4, "betas": [0.9, 0.95], "mini_batch": 32},
            "sampling": {"max_tokens": 24},
        },
    ),
}


def tokens_by_step(run: Path) -> list[int]:
    """Tokens that have been sampled in all steps up to each, without those of evaluations."""
    with SqliteStore.open(run, read_only=True) as store:
        return list(accumulate(int(tokens) for _, tokens in store.rows(_SAMPLED)))


def curve(run: Path) -> list[tuple[int, float]]:
    """Sampled tokens and held-out success after each evaluation, by the mean of the last WINDOW of them."""
    tokens = tokens_by_step(run)
    evaluated = [
        (line["step"], line["held_out"]["success"]) for line in read_metrics(run) if "success" in line["held_out"]
    ]
    means = [sum(s for _, s in evaluated[i + 1 - WINDOW : i + 1]) / WINDOW for i in range(WINDOW - 1, len(evaluated))]
    return [(tokens[step], mean) for (step, _), mean in zip(evaluated[WINDOW - 1 :], means, strict=True)]


def train_to(run: Path, way: str, seed: int, steps: int, options: argparse.Namespace) -> None:
    """Train a run to so many steps, from its last step."""
    app = APPLICATIONS[options.task]
    tasks = app.pool(seed, options)
    done = sum(1 for _ in read_metrics(run)) if run.exists() else 0
    if done >= steps:
        return
    if run.exists():
        resume(run, workflow=app.flow, tasks=tasks, changes={"steps": steps}, console=console)
    else:
        held_out = options.out / f"held_out-{options.task}.jsonl"
        held_out.write_text("".join(json.dumps(task) + "\n" for task in app.fresh(options)))
        settings = {
            **app.settings,
            "model": str(app.model(seed, options)),
            "steps": steps,
            "tasks_per_step": options.tasks_per_step,
            "seed": seed,
            "checkpoint_every": EVERY,
            "plan": {"kind": "independent", "k": 8},
            "loss": {"clip_high": 0.28, "entropy": 0.03},
            "rewards": {"zero_variance": True},
            "learner": {**app.settings["learner"], "dtype": options.dtype},
            "evaluation": {"tasks": str(held_out), "every": EVERY},
            **WAYS[way],
        }
        train(app.flow, tasks, settings, out=run, console=console)
    if sum(1 for _ in read_metrics(run)) < steps:
        raise SystemExit(f"{run}: stopped before step {steps}; the same command continues it")


def result(way: str, seed: int, mark: tuple[int, float] | None, options: argparse.Namespace) -> dict[str, Any]:
    """Train: `plain` for so many steps, the others until they reach its mark or have sampled as many tokens."""
    named = f"{way}-{options.task}-{options.size}-{options.pool}-{options.tasks_per_step}-{options.dtype}"
    run = options.out / f"seed{seed}" / named
    steps = options.steps if mark is None else EVERY * WINDOW
    train_to(run, way, seed, steps, options)
    while mark is not None and curve(run)[-1][0] < mark[0] and max(s for _, s in curve(run)) < mark[1]:
        steps += 2 * EVERY
        train_to(run, way, seed, steps, options)
    lines, points = read_metrics(run), curve(run)
    wanted = points[-1][1] if mark is None else mark[1]  # plain too may have stood there before its end
    at = next((point for point in points if point[1] >= wanted), None)
    flat = [role["zero_variance"] for line in lines for role in line["roles"].values() if "zero_variance" in role]
    return {
        "tokens": points[-1][0],
        "success": points[-1][1],
        "reached_at": at[0] if at is not None and (mark is None or at[0] <= mark[0]) else None,
        "steps": len(lines),
        "rows": sum(line["rows"] for line in lines),
        "flat": round(sum(flat) / len(flat), 4),
        "refilled": sum(line["refill"].get("tasks", 0) for line in lines),
        "curve": [(tokens, round(success, 4)) for tokens, success in points],
    }


def summary(lines: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By way: by seed the share of `plain`'s tokens at which its success was reached, None if it was not."""
    plain = {line["seed"]: line for line in lines if line["way"] == "plain"}
    by_way: dict[str, dict[str, Any]] = {}
    for way in WAYS:
        way_lines = sorted((line for line in lines if line["way"] == way), key=lambda line: line["seed"])
        way_lines = [line for line in way_lines if line["seed"] in plain]
        if not way_lines:
            continue
        shares = {
            str(line["seed"]): line["reached_at"] and round(line["reached_at"] / plain[line["seed"]]["tokens"], 3)
            for line in way_lines
        }
        by_way[way] = {
            "share": shares,
            "success": {str(line["seed"]): round(line["success"], 4) for line in way_lines},
            "tokens": {str(line["seed"]): line["tokens"] for line in way_lines},
            "flat": round(sum(line["flat"] for line in way_lines) / len(way_lines), 4),
            "steps": {str(line["seed"]): line["steps"] for line in way_lines},
        }
    return by_way


def table(rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """The ways side by side, each column by seed."""
    shown = Table(title="Tokens until the success of plain training")
    for title in ("way", "share of plain's tokens", "success at its end", "tokens at its end", "flat groups"):
        shown.add_column(title)
    for way, row in rows.items():
        shares = ", ".join("not reached" if share is None else f"{share:.2f}" for share in row["share"].values())
        success = ", ".join(f"{value:.1%}" for value in row["success"].values())
        shown.add_row(way, shares, success, ", ".join(f"{n:,}" for n in row["tokens"].values()), f"{row['flat']:.0%}")
    return shown


def main() -> None:
    """Do the runs that are not recorded yet, and print all results."""
    parser = run_parser(__doc__, "runs/refill", WAYS)
    parser.add_argument("--task", choices=APPLICATIONS, default="plan_path")
    parser.add_argument("--steps", type=int, default=36, help="training steps of plain (default: %(default)s)")
    parser.add_argument(
        "--size", type=int, default=grid.SIZE, help="cells on a side of Plan-Path's grid (default: %(default)s)"
    )
    parser.add_argument("--tasks-per-step", type=int, default=12)
    parser.add_argument("--pool", type=int, default=96, help="tasks to train on (default: %(default)s)")
    parser.add_argument("--tasks", type=int, default=100, help="held-out tasks (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=260, help="steps of warm-up (default: %(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of matrix products")
    options = parser.parse_args()
    results = KeptResults(options, "task", "steps", "size", "tasks_per_step", "pool", "tasks", "warm_up", "dtype")
    for seed in map(int, options.seeds.split(",")):
        for way in ("plain", *(way for way in options.ways.split(",") if way != "plain")):
            plain = results.lines(way="plain", seed=seed)
            mark = (plain[0]["tokens"], plain[0]["success"]) if plain and way != "plain" else None
            if line := results.once(partial(result, way, seed, mark, options), way=way, seed=seed):
                console.print(f"seed {seed}: {way} {line['success']:.1%} with {line['tokens']:,} tokens")
    rows = summary(results.lines())
    Console(width=140).print(table(rows))
    print(json.dumps({"settings": results.settings, "rows": rows}))


if __name__ == "__main__":
    main()
