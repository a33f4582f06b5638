"""Benchmarks of many long runs: a stopped run is resumed; results are lines of OUT/results.jsonl, kept."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from cotune.config.train import TrainConfig
from cotune.storage.metrics_file import read_metrics
from cotune.trainer.train import resume, train


def run_parser(doc: str | None, out: str, ways: Iterable[str] = ()) -> argparse.ArgumentParser:
    """The options that all of them have: seeds, the folder of the runs, and with `ways` the choice of them."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated (default: %(default)s)")
    if ways:
        parser.add_argument("--ways", default=",".join(ways), help="comma-separated (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path(out), help="folder of the runs (default: %(default)s)")
    return parser


class KeptResults:
    """The results in `options.out` that were made with the same values of `settings`, which are names of options."""

    def __init__(self, options: argparse.Namespace, *settings: str) -> None:
        options.out.mkdir(parents=True, exist_ok=True)
        self.settings = {name: getattr(options, name) for name in settings}
        self._path = options.out / "results.jsonl"

    def lines(self, **which: Any) -> list[dict[str, Any]]:
        """All results so far, or those with these values."""
        lines = map(json.loads, self._path.read_text().splitlines() if self._path.is_file() else ())
        wanted = {**which, "settings": self.settings}.items()
        return [line for line in lines if all(line[name] == value for name, value in wanted)]

    def once(self, compute: Callable[[], dict[str, Any]], **which: Any) -> dict[str, Any] | None:
        """Compute a result and keep it; None if there is one with these values."""
        if self.lines(**which):
            return None
        line = {**which, "settings": self.settings, **compute()}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return line


def train_once(
    run: Path,
    flow: Any,
    tasks: Sequence[Any] | None,
    settings: Mapping[str, Any] | TrainConfig,
    steps: int,
    console: Console,
) -> Path:
    """The folder of a training of so many steps, done, resumed if it is not finished, or as it is.

    Raises SystemExit if it was stopped before its last step: there is nothing to measure yet.
    """
    if not (run / "run.json").is_file():
        console.print(f"training {run}, {steps} steps")
        train(flow, tasks, settings, out=run, console=console)
    elif _steps_done(run) < steps:
        resume(run, workflow=flow, tasks=tasks, console=console)
    if (done := _steps_done(run)) < steps:
        raise SystemExit(f"{run}: stopped after {done} of {steps} steps; the same command continues it")
    return run


def _steps_done(run: Path) -> int:
    return sum(1 for _ in read_metrics(run))


def over_seeds(lines: Sequence[Mapping[str, Any]], tasks: int, name: str = "trained") -> dict[str, Any]:
    """Mean success over the seeds, of `name` in the results, and by seed."""
    ordered = sorted(lines, key=lambda line: line["seed"])
    return {
        "success": mean_share(lines, tasks, name),
        "seeds": {str(line["seed"]): round(line["reached"][name] / tasks, 4) for line in ordered},
    }


def mean_share(lines: Sequence[Mapping[str, Any]], tasks: int, name: str) -> float:
    """The mean share over the seeds."""
    return round(sum(line["reached"][name] for line in lines) / tasks / len(lines), 4)


def success_cells(row: Mapping[str, Any]) -> tuple[str, str]:
    """Success, and by seed, as a table shows them."""
    seeds = ", ".join(f"{value:.1%}" for value in row["seeds"].values())
    return f"{row['success']:.1%}", seeds
