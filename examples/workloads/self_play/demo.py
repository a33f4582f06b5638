"""Self-play, step by step: the base model, training, and the curve of what the players do.

    python -m examples.workloads.self_play.demo --out runs/self_play --game duel       # a minute on one core
    python -m examples.workloads.self_play.demo --out runs/self_play --game noughts    # about fifteen

`duel` prints how often each player chooses left, and how much could be won against that; `noughts` how often the
trained player, against random moves, won as x or did not lose as o, and what x wins of o in self-play.
"""

from __future__ import annotations

import argparse
import json
import os
import tomllib
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import cotune
from cotune.storage.metrics_file import read_metrics
from examples.workloads.self_play import base, train
from examples.workloads.self_play.duel import exploitability

SETTINGS: dict[str, dict[str, Any]] = {
    "duel": {
        "recipe": "spiral",
        "policies": "full",
        "steps": 100,
        "tasks_per_step": 1,
        "plan": {"k": 64},
        "loss": {"entropy": 0.5},
        "learner": {"lr": 1e-4, "betas": [0.0, 0.99]},
    },
    "noughts": {**tomllib.loads(Path(__file__).with_name("small.toml").read_text()), "evaluation": {"every": 25}},
}
TASKS: dict[str, dict[str, Any]] = {
    "duel": {"id": "game", "game": "duel", "logit_bias": base.choices_only()},
    "noughts": {"id": "game", "game": "noughts"},
}
"""Without rules, which the base has no words for."""
GAMES = 100
"""Games against random moves from each seat."""


def main() -> None:
    """Train, and print the curve."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--game", choices=sorted(TASKS), required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int)
    options = parser.parse_args()
    model = options.out / "base"
    if not model.exists():
        base.build(model, seed=options.seed)
    run = options.out / f"{options.game}{options.seed}"
    play(options.game, model, run, seed=options.seed, **({"steps": options.steps} if options.steps else {}))
    print(json.dumps({"game": options.game, "seed": options.seed, "curve": CURVES[options.game](run)}))


def play(game: str, model: Path, run: Path, **settings: Any) -> None:
    """Train on one game into a new run folder; `settings` go before its own."""
    chosen = {**SETTINGS[game], **settings, "model": str(model)}
    if "evaluation" in chosen:
        tasks = run.with_suffix(".jsonl")
        tasks.parent.mkdir(parents=True, exist_ok=True)
        rounds = [{"id": f"{seat}{i}", "game": game, "random": seat} for seat in ("o", "x") for i in range(GAMES)]
        tasks.write_text("".join(json.dumps(task) + "\n" for task in rounds))
        chosen["evaluation"] = {**chosen["evaluation"], "tasks": str(tasks)}
    cotune.train(getattr(train, game), [TASKS[game]], chosen, out=run)


def duel_curve(run: Path) -> list[dict[str, float]]:
    """Per ten steps: mean shares of left, and how much could be won against them."""
    lines = [(line["outcome"]["row_left"], line["outcome"]["column_left"]) for line in read_metrics(run)]
    tens = [list(zip(*lines[i : i + 10], strict=True)) for i in range(0, len(lines), 10)]
    shares = [(fmean(row), fmean(column)) for row, column in tens]
    return [{"row": r, "column": c, "exploitability": exploitability(r, c)} for r, c in shares]


def noughts_curve(run: Path) -> list[dict[str, float]]:
    """Per step that evaluates, counted from 1: how often the trained player succeeded against random moves; and x's
    mean reward in self-play."""
    return [
        {"step": line["step"] + 1, "success": line["held_out"]["success"], "x": line["outcome"]["x"]}
        for line in read_metrics(run)
        if line["held_out"]
    ]


CURVES = {"duel": duel_curve, "noughts": noughts_curve}

if __name__ == "__main__":
    main()
