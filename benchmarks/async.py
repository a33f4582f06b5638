"""Mode async against mode sync. Prints a table; the last line is JSON: sync_step_s, async_step_s, ratio, staleness.

Both train the Plan-Path team of examples/plan_path from one base, with the same seeds, in turns: a run of each mode
per round. A step's time covers all its phases, waiting included; the first step of a run is left out. `ratio` is
sync over async, `staleness` the rows of async by how many versions their sampler was behind.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENAI_API_KEY", "none")
EXAMPLE = Path(__file__).parents[1] / "examples" / "plan_path"


def run(folder: Path, base: Path, mode: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Train in one mode; the lines of its metrics."""
    from rich.console import Console

    from cotune.storage.metrics_file import read_metrics
    from cotune.trainer.config.load import load_config
    from cotune.trainer.train import train
    from examples.plan_path import grid

    flags = {"model": str(base), "mode": mode, "schedule.kind": "constant", **settings}
    config = load_config(EXAMPLE / "train.toml", flags)
    tasks = list(grid.make_tasks(config.steps * config.tasks_per_step, 0))
    train("examples.plan_path.train:solve", tasks, config, out=folder, console=Console(stderr=True))
    return list(read_metrics(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each mode (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="steps of each run (default: %(default)s)")
    parser.add_argument("--cluster", help="run on Ray at this address: local or HOST:PORT")
    options = parser.parse_args()
    settings = {"steps": options.steps, "cluster.address": options.cluster}
    seconds: dict[str, list[float]] = {"sync": [], "async": []}
    last: dict[str, list[float]] = {"sync": [], "async": []}
    staleness: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        from examples.plan_path import base

        folder = Path(name)
        base.build(folder / "base")
        for number in range(options.rounds):
            for mode in ("sync", "async") if number % 2 else ("async", "sync"):
                lines = run(folder / f"{mode}{number}", folder / "base", mode, settings)
                seconds[mode] += [sum(line["seconds"].values()) for line in lines[1:]]
                last[mode].append(statistics.fmean(r["reward"] for r in lines[-1]["roles"].values()))
                if mode == "async":
                    for line in lines:
                        staleness.update(line["staleness"])
    print(f"{'mode':<6} {'s/step':>8} {'reward of the last step':>25}")
    for mode, times in seconds.items():
        print(f"{mode:<6} {statistics.median(times):>8.2f} {statistics.fmean(last[mode]):>25.3f}")
    medians = {mode: statistics.median(times) for mode, times in seconds.items()}
    figures = {
        "sync_step_s": round(medians["sync"], 3),
        "async_step_s": round(medians["async"], 3),
        "ratio": round(medians["sync"] / medians["async"], 3),
        "staleness": dict(sorted(staleness.items())),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
