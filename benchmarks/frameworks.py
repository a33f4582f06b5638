"""The same task, team and recipe in three frameworks: success after a short training, and the cost of each.

    python -m benchmarks.frameworks

Last line: {FRAMEWORK: {"base", "trained", "calls_per_s"}}.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = {
    "LangGraph": ("plan_path", "plan_path.base"),
    "AutoGen": ("workloads.plan_path_autogen", "plan_path.base"),
    "CrewAI": ("workloads.plan_path_crewai", "workloads.plan_path_crewai.base"),
}
"""By framework: its folder under examples/, and the function that builds its base model."""

QUIET = {"CREWAI_DISABLE_TELEMETRY": "true", "CREWAI_TRACING_ENABLED": "false", "OMP_NUM_THREADS": "1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--tasks-per-step", type=int, default=24, help="default: %(default)s")
    parser.add_argument("--fresh", type=int, default=300, help="held-out tasks (default: %(default)s)")
    parser.add_argument("--only", choices=EXAMPLES, action="append", help="repeatable")
    args = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    print(f"{'':12}{'base':>8}{'trained':>10}   {'95% interval':18}{'calls':>8}{'train':>9}{'calls/s':>9}")
    for framework in args.only or EXAMPLES:
        with tempfile.TemporaryDirectory() as folder:
            results[framework] = measure(framework, Path(folder), args)
    print(json.dumps(results))


def measure(framework: str, folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """Build the base, train, evaluate; print one row of the table."""
    example, base = EXAMPLES[framework]
    app = f"examples.{example}.train:solve"
    run("python", "-m", f"examples.{base}", "--out", folder / "base")
    for name, count, seed in (("tasks", 2000, 1), ("held", args.fresh, 2)):
        (folder / f"{name}.jsonl").write_text(
            run("python", "-m", "examples.plan_path.grid", "--tasks", count, "--seed", seed)
        )
    settings = ["--steps", args.steps, "--tasks-per-step", args.tasks_per_step]
    config = ["--config", "examples/plan_path/train.toml", "--model", folder / "base"]
    started = time.perf_counter()
    run("cotune", "train", app, "--tasks", folder / "tasks.jsonl", *config, *settings, "--out", folder / "run")
    seconds = time.perf_counter() - started
    held = ["--tasks", folder / "held.jsonl", "--run", folder / "run", "--modes", "base,trained"]
    run("cotune", "eval", app, *held, "--out", folder / "eval")
    steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    report = json.loads((folder / "eval" / "evaluation.json").read_text())["evaluations"]
    base_rate, trained = (report[mode]["success"] for mode in ("base", "trained"))
    calls = sum(step["calls"] for step in steps)
    rollout = sum(step["seconds"]["rollout"] for step in steps)
    interval = f"{trained['low']:.1%} to {trained['high']:.1%}"
    shares = f"{base_rate['mean']:8.1%}{trained['mean']:10.1%}   {interval:18}"
    print(f"{framework:12}{shares}{calls:8,}{seconds:8.0f}s{calls / rollout:9.0f}", flush=True)
    rate = round(calls / rollout, 1)
    return {"base": base_rate["mean"], "trained": trained["mean"], "calls_per_s": rate}


def run(program: str, *args: object) -> str:
    """Run a program of this environment in the repository; its output."""
    command = [str(Path(sys.executable).parent / program), *map(str, args)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **QUIET}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
