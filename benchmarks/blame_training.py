"""Does `cotune blame` predict which role gains most when it is trained? On pretrained weights: SmolLM2-135M-Instruct.

    python -m benchmarks.blame_training                                   # both applications
    python -m benchmarks.blame_training --applications word_problems --tokens 2000

The model answers for every role. `cotune.blame` swaps each role's answers to a reference that is always right, a
scripted provider behind a real HTTP server, and says how many points each role costs: its headroom. Then each role is
trained alone from the same weights, for the same number of tokens, and evaluated on held-out tasks while the untrained
model plays the other roles. `word_problems` is the example with a planner and a checker. In `four_roles` a counter, a
finder and a colourist read an order side by side, and a writer puts their answers on a label.

Results are appended to OUT/results.jsonl and not computed again under the same settings; runs are resumed. The last
line is JSON.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import cotune
from benchmarks.blame_training_apps import APPLICATIONS, Application
from benchmarks.kept_results import KeptResults
from cotune.storage.metrics_file import read_metrics
from cotune.trainer.evaluation.evaluate import evaluate
from cotune.trainer.train import resume, train
from examples.tool_agent.provider import serving
from examples.word_problems.demo import CONFIG, pretrained

TRAINING = 512
"""Tasks to train on. Those after them are held out for the evaluations, and those after these for the analysis."""
console = Console(stderr=True)


def headroom(application: Application, out: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Analyse the untrained application against a reference that is always right: points that each role costs."""
    tasks = application.tasks(options.analysed, TRAINING + options.tasks)
    with serving(answers=application.right_answers(tasks)) as url:
        os.environ |= {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "none"}
        found = cotune.blame(
            application.workflow,
            tasks,
            references=("openai:always-right",),
            model=str(pretrained()),
            limit=options.analysed,
            runs=options.runs,
            max_tokens=24,
            concurrency=16,
            out=str(out),
        )
    points = {
        role.role: [found.points(x) for x in (role.score.mean, role.score.low, role.score.high)] for role in found.roles
    }
    return {"points": points, "sentence": found.sentence, "runs": found.runs, "calls": found.calls}


def train_alone(application: Application, role: str, out: Path, tokens: int) -> int:
    """Train one role until its updates have computed `tokens` tokens. Returns their number."""
    policies: list[dict[str, Any]] = [{"name": role, "roles": [role]}]
    others = [other for other in application.roles if other != role]
    policies.append({"name": "untrained", "roles": others, "kind": "frozen"})
    table = {**tomllib.loads(CONFIG.read_text()), "policy": policies, "model": str(pretrained())}
    table["evaluation"] = {"tasks": "none"}  # the run's own evaluations would take longer than its steps
    steps, tasks = 1, application.tasks(TRAINING, 0)
    if not (out / "run.json").is_file():
        train(application.workflow, tasks, {**table, "steps": steps}, out=out, console=console)
    while True:
        # A step in which all answers to each call earned the same has no update.
        updates = [line["policies"].get(role, {}) for line in read_metrics(out)]
        computed = [update.get("computed_tokens", 0) for update in updates]
        missing = tokens - sum(computed)
        if missing <= 0:
            return sum(computed)
        steps = len(computed) + math.ceil(missing / max(1, sum(computed) / len(computed)))
        summary = resume(out, workflow=application.workflow, tasks=tasks, changes={"steps": steps}, console=console)
        if not summary.finished:
            raise SystemExit(f"{out}: stopped; the same command continues it")


def result(application: Application, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The headroom of each role, and what training it alone gains."""
    found = headroom(application, folder / "blame", options)
    console.print(f"{application.name}: {found['points']}")
    held_out = application.tasks(options.tasks, TRAINING)
    solved: dict[str, int] = {}
    gains: dict[str, Any] = {}
    for role in application.roles:
        run = folder / role
        computed = train_alone(application, role, run, options.tokens)
        modes = ("trained",) if solved else ("base", "trained")
        for mode, evaluation in evaluate(run, application.workflow, held_out, modes=modes).evaluations.items():
            solved[mode] = sum(evaluation.successes.values())
        gains[role] = {"tokens": computed, "steps": sum(1 for _ in read_metrics(run)), **solved}
        console.print(f"{application.name}, {role} trained alone: {gains[role]}")
    return {**found, "gains": gains}


def rows(line: Mapping[str, Any], tasks: int) -> Sequence[tuple[str, ...]]:
    """The table's rows of an application: the role with the largest headroom first."""
    listed = []
    for role, (mean, low, high) in sorted(line["points"].items(), key=lambda item: -item[1][0]):
        gain = line["gains"][role]
        base, trained = gain["base"] / tasks, gain["trained"] / tasks
        points = f"{100 * (trained - base):+.1f}"
        after = f"{base:.1%} to {trained:.1%}"
        listed.append(
            (line["application"], role, f"{mean:.0f} ({low:.0f} to {high:.0f})", points, after, str(gain["steps"]))
        )
    return listed


def main() -> None:
    """Do what is not recorded yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--applications", default=",".join(APPLICATIONS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--analysed", type=int, default=20, help="tasks of the analysis (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=16, help="runs on each of them (default: %(default)s)")
    parser.add_argument(
        "--tokens", type=int, default=5_000, help="tokens that updates of a role compute (default: %(default)s)"
    )
    parser.add_argument("--tasks", type=int, default=150, help="held-out tasks (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/blame_training"))
    options = parser.parse_args()
    results = KeptResults(options, "analysed", "runs", "tokens", "tasks")
    table = Table(title="Headroom of a role by `cotune blame`, and its gain when it is trained alone, in points")
    for title in ("application", "role", "headroom", "gain", "success", "steps"):
        table.add_column(title)
    lines = []
    for name in options.applications.split(","):
        application = APPLICATIONS[name]
        results.once(partial(result, application, options.out / name, options), application=name)
        [line] = results.lines(application=name)
        lines.append(line)
        for row in rows(line, options.tasks):
            table.add_row(*row)
    Console(width=120).print(table)
    print(json.dumps(lines))


if __name__ == "__main__":
    main()
