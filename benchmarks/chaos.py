"""Runs on Ray in which something breaks. Prints a table; the last line is JSON: runs, finished, resumed, failed,
groups_lost, trained_twice, stale_trained, leaked.

Each run trains a tiny model for some steps with two engines, two FSDP learners and two rollout workers. At a random
moment something is done to a random part: the router, a learner, a rollout worker or the driver is killed, an engine is
killed, stopped or slowed. A run that ends early is resumed, or started again if it had not begun. Afterwards records
and metrics are checked against each other.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.trainer import chaos
from tests.trainer.forked import Command
from tests.trainer.tiny_app import build_base
from tests.trainer.tiny_run import GONE, Audit, audit, launch, new_run, on_cluster

K = 8
PATIENCE = 600.0
"""Seconds that a run may take before it counts as failed."""
CLUSTER = {"address": "local", "engines": 2, "learners": 2, "rollout_workers": 2}


class Verdict(NamedTuple):
    """The outcome of one run, and the contents of its records."""

    fault: str
    ended: str
    resumes: int
    seconds: float
    audit: Audit
    leaked: int


def one(folder: Path, base: Path, steps: int, chance: random.Random, faults: Sequence[chaos.Fault]) -> Verdict:
    """A run with one fault, resumed until it has finished."""
    started = time.perf_counter()
    run = folder / "run"
    fresh = new_run(base, run, steps, "-k", str(K), "--set=engine=transformers", *on_cluster(CLUSTER))
    process = launch(fresh, run)
    moment = chaos.random_moment(chance, steps - 1, 3.0)
    injected, family = None, []
    if chaos.wait_for(moment, run, process.pid):
        family = chaos.family(process.pid)
        injected = chaos.inject(process.pid, chance, faults)
    ended, resumes = finish(process), 0
    while ended != "finished" and resumes < 3:
        resumes += 1
        begun = (run / "run.json").exists()
        ended = finish(launch(["--resume", str(run)] if begun else fresh, run))
    leaked = len(chaos.survivors(family, GONE))
    fault = f"{injected.fault} ({injected.title[:24]})" if injected else "none: the run had ended"
    seconds = time.perf_counter() - started
    return Verdict(fault, ended, resumes, seconds, audit(run, steps), leaked)


def finish(process: Command) -> str:
    """Wait for the end of a run: finished, stopped, or hung (it is killed then)."""
    try:
        return "finished" if process.wait(PATIENCE) == 0 else "stopped"
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return "hung"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=10, help="of each run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--keep", type=Path, help="keep the runs' folders here")
    parser.add_argument("--fault", choices=[fault.name for fault in chaos.FAULTS], help="default: any of them")
    options = parser.parse_args()
    faults = [fault for fault in chaos.FAULTS if options.fault in (None, fault.name)]
    verdicts = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        base = build_base(folder / "base")
        for number in range(options.runs):
            place = folder / f"run{number}"
            place.mkdir(parents=True)
            verdict = one(place, base, options.steps, random.Random(options.seed * 1000 + number), faults)
            verdicts.append(verdict)
            lost, twice, stale = verdict.audit
            print(f"{number:>3}  {verdict.fault:<46} {verdict.ended:<9} resumes {verdict.resumes}  "
                  f"{verdict.seconds:6.0f} s  lost {lost}  twice {twice}  "
                  f"stale {stale}  leaked {verdict.leaked}", flush=True)  # fmt: skip
    figures = {
        "runs": len(verdicts),
        "finished": sum(v.ended == "finished" and not v.resumes for v in verdicts),
        "resumed": sum(v.ended == "finished" and v.resumes > 0 for v in verdicts),
        "failed": sum(v.ended != "finished" for v in verdicts),
        "groups_lost": sum(v.audit.groups_lost for v in verdicts),
        "trained_twice": sum(v.audit.trained_twice for v in verdicts),
        "stale_trained": sum(v.audit.stale_trained for v in verdicts),
        "leaked": sum(v.leaked for v in verdicts),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
