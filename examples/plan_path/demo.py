"""The whole loop on one machine: record, train by role, evaluate, export, serve, and run the same app again.

    python -m examples.plan_path.demo

Each stage prints the command that does the same by hand. Ends with a table and RUN/summary.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from examples.plan_path.grid import make_tasks

HERE = Path(__file__).parent
APP = "examples.plan_path.app"
BASE = "examples.plan_path.base"
WORKFLOW = "examples.plan_path.train:solve"
CONFIG = HERE / "train.toml"
TRAIN_SEED, HELD_OUT_SEED = 0, 1
MODES = ("base", "trained", "swapped")
console = Console(soft_wrap=True)


class Stages:
    """Announces stages and keeps their seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str, command: str) -> Iterator[None]:
        console.rule(f"[bold]{name}")
        console.print(f"$ {command}", style="cyan", markup=False, highlight=False)
        started = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - started, 1)


def write_tasks(path: Path, count: int, seed: int) -> Path:
    """A tasks file of the game."""
    path.write_text("".join(json.dumps(task) + "\n" for task in make_tasks(count, seed)))
    return path


def run_app(url: str, tasks: int) -> tuple[int, int]:
    """Run the unchanged application in a process of its own against `url`; return (reached, tasks)."""
    environment = {**os.environ, "OPENAI_BASE_URL": url}
    command = [sys.executable, "-m", APP, "--tasks", str(tasks), "--seed", str(HELD_OUT_SEED)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    result = re.search(r"(\d+) of (\d+) reached", done.stdout)
    if done.returncode or not result:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return int(result[1]), int(result[2])


def trace_base(url: str, tasks: Path, count: int, out: Path) -> None:
    """Record the application as it is today, with the model that it uses today."""
    command = [sys.executable, "-m", "cotune", "trace", WORKFLOW, "--tasks", str(tasks)]
    command += ["--out", str(out), "--limit", str(count), "--concurrency", "32"]
    subprocess.run(command, env={**os.environ, "OPENAI_BASE_URL": url}, check=True)


def interval(found: Any) -> dict[str, float]:
    """An interval as plain JSON."""
    return {"mean": found.mean, "low": found.low, "high": found.high, "n": found.n}


def table(summary: dict[str, Any]) -> Table:
    """The table at the end of the demo."""
    shown = Table(title="Plan-Path: share of held-out tasks whose goal was reached")
    for title in ("policies", "success", "95% interval", "tasks"):
        shown.add_column(title, justify="left" if title == "policies" else "right")
    names = {
        "base": "base",
        "trained": "trained",
        "served": "trained, served over HTTP",
        "swapped": "trained, roles swapped",
    }
    for key, name in names.items():
        row = summary[f"success_{key}"]
        shown.add_row(name, f"{row['mean']:.1%}", f"{row['low']:.1%} to {row['high']:.1%}", str(row["n"]))
    return shown


def conclude(
    out: Path, run: Path, report: Any, served: Any, trained: Any, stages: Stages, more: dict[str, Any] | None = None
) -> None:
    """Write summary.json, with `more` figures in it, and print the table."""
    summary = {
        **{f"success_{mode}": interval(report.evaluations[mode].success) for mode in MODES},
        "success_served": interval(served),
        **(more or {}),
        "seconds": {**stages.seconds, "total": round(sum(stages.seconds.values()), 1)},
        "calls": trained.calls,
        "candidates": trained.candidates,
        "groups": trained.groups,
        "left_out": dict(trained.left_out),
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    console.print(table(summary))
    console.print(
        f"{summary['seconds']['total']:.0f} s in all; figures in {out / 'summary.json'}, records: cotune show {run}"
    )


def main() -> None:
    """Run all stages into the folder `--out`, replacing the results of an earlier demo."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    parser.add_argument("--eval-tasks", type=int, default=300, help="held-out tasks (default: %(default)s)")
    parser.add_argument("--trace-tasks", type=int, default=32, help="base episodes recorded (default: %(default)s)")
    options = parser.parse_args()
    out: Path = options.out
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    os.environ.setdefault("OPENAI_API_KEY", "none")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    base, run, export = out / "base", out / "run", out / "export"
    stages = Stages()

    with stages("warm up a base model", f"python -m {BASE} --out {base}"):
        subprocess.run([sys.executable, "-m", BASE, "--out", str(base)], check=True)
    tasks = write_tasks(out / "tasks.jsonl", 4096, TRAIN_SEED)
    held_out = write_tasks(out / "held_out.jsonl", options.eval_tasks, HELD_OUT_SEED)

    from cotune.adapters.export import export_run
    from cotune.adapters.serving import serving
    from cotune.intervals import share
    from cotune.trainer.config.load import load_config
    from cotune.trainer.evaluation.evaluate import evaluate
    from cotune.trainer.evaluation.report import render
    from cotune.trainer.train import train

    with (
        stages("record", f"cotune serve {base} & cotune trace {WORKFLOW} --tasks {tasks} --out {out / 'trace'}"),
        serving(base, names=("navigator", "driver")) as endpoint,
    ):
        trace_base(endpoint.url, tasks, options.trace_tasks, out / "trace")
    with stages("train", f"cotune train {WORKFLOW} --tasks {tasks} --model {base} --config {CONFIG} --out {run}"):
        trained = train(WORKFLOW, tasks, load_config(CONFIG, {"model": str(base)}), out=run, console=console)
    if not trained.finished:
        raise SystemExit(f"stopped; continue with: cotune train --resume {run}")
    with stages("evaluate", f"cotune eval {WORKFLOW} --tasks {held_out} --run {run} --modes base,trained,swapped"):
        report = evaluate(run, WORKFLOW, held_out, modes=MODES)
        console.print(render(report))
    with stages("export", f"cotune export {run} --out {export}"):
        export_run(run, export)
    with (
        stages("serve", f"cotune serve {export} & OPENAI_BASE_URL=... python -m {APP} --tasks {options.eval_tasks}"),
        serving(export) as endpoint,
    ):
        served = share(*run_app(endpoint.url, options.eval_tasks))

    conclude(out, run, report, served, trained, stages)


if __name__ == "__main__":
    main()
