"""Does a role with more tokens capture a policy that it shares, and does a balanced gradient prevent it?

    python -m benchmarks.balance                            # 3 seeds x 3 ways
    python -m benchmarks.balance --seeds 0 --steps 6        # a reduced form

In each episode a worker is called six times, and answers with up to eight letters; a chief is called once, and answers
with one. A scorer wants letters of the first half of the alphabet from the worker, of the second half from the chief.
`shared`: one policy plays both, all weights trained with AT-GRPO (K = 8, tree). `equal`: the same with a balanced
gradient. `isolated`: a policy for each. The model has 0.1M parameters and is untrained.

Rewards are means over all candidates. `first`, `middle`, `last`: of five steps there; `best`: of the best five in a
row. In each update of `shared` and `equal`, the shown share of the worker is compared with the share of its
gradient over all parameters, which two further backward passes compute. Runs lie in OUT and are not repeated. The last
line is JSON.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")  # nothing is asked there: the policies answer

import argparse
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.table import Table

import cotune
from benchmarks.kept_results import KeptResults, run_parser, train_once
from cotune.algorithms.samples import TrainRow
from cotune.methods import AtGrpo
from cotune.storage.metrics_file import read_metrics
from cotune.trainer.learner.local import LocalLearner
from cotune.trainer.learner.policy_model import PolicyModel
from tests.trainer.tiny_app import ask, build_base

ROLES = ("worker", "chief")
WINDOW = 5
"""Steps whose mean reward is compared."""
BOTH = {"name": "both", "kind": "full", "roles": list(ROLES)}
TIMES = ("first", "middle", "best", "last")
WAYS: dict[str, dict[str, Any]] = {
    "shared": {"policy": [BOTH]},
    "equal": {"policy": [BOTH], "recipe": f"{__file__}:Balanced"},
    "isolated": {"policies": "full"},
}
console = Console(stderr=True)


class Balanced(AtGrpo):
    """AT-GRPO with a balanced gradient."""

    loss = msgspec.structs.replace(AtGrpo.loss, balance="equal")


@cotune.workflow
async def team(task: Mapping[str, str]) -> float:
    """Six calls of the worker, one of the chief. Only the scorers reward."""
    for part in "abcdef":
        await ask("worker", f"work on {part} of {task['letter']}", max_tokens=8)
    await ask("chief", f"lead {task['letter']}", max_tokens=1)
    return 0.0


@team.scorer("worker")
def first_half(candidate: Any, call: Any, task: Any) -> float:
    """The share of letters a to m in the answer."""
    return sum("a" <= letter <= "m" for letter in candidate.text) / 8


@team.scorer("chief")
def second_half(candidate: Any, call: Any, task: Any) -> float:
    """Whether the answer is a letter n to z."""
    return float(len(candidate.text) == 1 and "n" <= candidate.text <= "z")


class MeasuredLearner:
    """Computes the worker's share of the true gradient in each update of a shared policy, while it is in use."""

    def __init__(self) -> None:
        self.shares: list[tuple[float, float]] = []
        """The true share and the shown one, of each update."""

    def __enter__(self) -> MeasuredLearner:
        self._update = plain = LocalLearner.update

        def update(learner: LocalLearner, policy: str, rows: Sequence[TrainRow], **options: Any) -> Mapping[str, float]:
            lengths = true_lengths(learner._policies[policy], rows, balanced=learner._methods[policy].loss.balance)
            figures = plain(learner, policy, rows, **options)
            if len(lengths) == len(ROLES) and "worker/gradient_share" in figures:
                true = lengths["worker"] / sum(lengths.values())
                self.shares.append((true, figures["worker/gradient_share"]))
            return figures

        LocalLearner.update = update  # type: ignore[method-assign]
        return self

    def __exit__(self, *exc: object) -> None:
        LocalLearner.update = self._update  # type: ignore[method-assign]


def true_lengths(model: PolicyModel, rows: Sequence[TrainRow], *, balanced: str) -> dict[str, float]:
    """The length of each role's gradient over all trained parameters, before the update's only optimizer step.

    Rows are on policy there, so the gradient is that of A log pi.
    """
    lengths: dict[str, float] = {}
    estimates: dict[str, float] = {}
    for role in ROLES:
        own = [row for row in rows if row.role == role and row.advantage]
        if not own:
            continue
        logprobs, _ = model.token_logprobs(own)
        advantages = torch.tensor([row.advantage for row in own for _ in row.response_ids])
        (advantages * logprobs).sum().backward()
        squares = [float(p.grad.square().sum()) for p in model.parameters().values() if p.grad is not None]
        lengths[role] = sum(squares) ** 0.5
        for parameter in model.parameters().values():
            parameter.grad = None
        estimates[role] = float((advantages * (1.0 - logprobs.detach().exp())).norm())
    if balanced == "equal":
        lengths = {role: length / estimates[role] for role, length in lengths.items()}
    return lengths


def result(way: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train, and sum up the rewards and shares of all steps."""
    base: Path = options.out / f"base{seed}"
    if not (base / "tokenizer_config.json").is_file():
        build_base(base, seed=seed)
    settings = {
        "model": str(base),
        "steps": options.steps,
        "tasks_per_step": 4,
        "seed": seed,
        "plan": {"kind": "tree", "k": 8},
        "rewards": {"team_weight": 0.0},
        # One optimizer step for each update, before which the true gradients are computed.
        "learner": {"lr": options.lr, "mini_batch": 4096},
        **WAYS[way],
    }
    tasks = [{"id": letter, "letter": letter} for letter in "abcdefghijklmnopqrstuvwxyz"]
    run = options.out / f"{way}-{seed}-{options.steps}-{options.lr:g}"
    with MeasuredLearner() as measured:
        train_once(run, team, tasks, settings, options.steps, console)
    lines = list(read_metrics(run))
    figures: dict[str, Any] = {"shares": measured.shares, "seconds": sum(sum(ln["seconds"].values()) for ln in lines)}
    for role in ROLES:
        rewards = [line["roles"][role]["reward"] for line in lines]
        middle = (len(rewards) - WINDOW) // 2
        windows = [fmean(rewards[start : start + WINDOW]) for start in range(len(rewards) - WINDOW + 1)]
        figures[role] = {"first": windows[0], "middle": windows[middle], "best": max(windows), "last": windows[-1]}
        figures[role]["rewards"] = rewards
    return figures


def summary(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rewards by way and role with those of each seed, and the shown shares against the true ones."""
    ways: dict[str, Any] = {}
    for way in WAYS:
        lines = sorted((line for line in results if line["way"] == way), key=lambda line: line["seed"])
        if not lines:
            continue
        ways[way] = {"seeds": [line["seed"] for line in lines]}
        for role in ROLES:
            for when in TIMES:
                ways[way][f"{role}_{when}"] = round(fmean(line[role][when] for line in lines), 3)
            ways[way][f"{role}_last_by_seed"] = [round(line[role]["last"], 3) for line in lines]
        shares = [share for line in lines for share in line["shares"]]
        if shares:
            errors = [abs(shown - true) for true, shown in shares]
            ways[way] |= {
                "true_share": round(fmean(true for true, _ in shares), 3),
                "shown_share": round(fmean(shown for _, shown in shares), 3),
                "mean_error": round(fmean(errors), 3),
                "largest_error": round(max(errors), 3),
                "updates": len(shares),
            }
    return ways


def main() -> None:
    """Make the runs that are not recorded yet, and print all results."""
    parser = run_parser(__doc__, "runs/balance", WAYS)
    parser.add_argument("--steps", type=int, default=25, help="(default: %(default)s)")
    parser.add_argument("--lr", type=float, default=2e-3, help="(default: %(default)s)")
    options = parser.parse_args()
    results = KeptResults(options, "steps", "lr")
    for seed in map(int, options.seeds.split(",")):
        for way in options.ways.split(","):
            results.once(partial(result, way, seed, options), way=way, seed=seed)
    ways = summary(results.lines())
    table = Table(title=f"Mean reward over {WINDOW} steps: {', '.join(TIMES)}")
    for title in ("way", *ROLES, "worker's share of the gradient, true", "shown"):
        table.add_column(title)
    for way, row in ways.items():
        rewards = (" ".join(f"{row[f'{role}_{when}']:.3f}" for when in TIMES) for role in ROLES)
        table.add_row(way, *rewards, *(str(row.get(name, "-")) for name in ("true_share", "shown_share")))
    Console(width=130).print(table)
    print(json.dumps({"settings": results.settings, "ways": ways}))


if __name__ == "__main__":
    main()
