"""Does training roles together teach the team, and how much does training a role alone teach? On Plan-Path.

    python -m benchmarks.learning                                 # everything; hours on one core
    python -m benchmarks.learning --seeds 0 --rows team_lora,team_swapped

The base model is reseeded and rebuilt per seed. All rows of a seed start from it, and train on the same tasks with
AT-GRPO (K = 8, tree) through cotune's own loop; every row is evaluated on the same fresh tasks at temperature 1.
A row's results are appended to OUT/results.jsonl when it is done and not computed again while its settings
stay the same; training runs lie in OUT/seedN and are resumed. Prints all rows so far; the last line is JSON.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import asyncio
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.kept_results import run_parser, train_once
from cotune.adapters.export import TrainedPolicy, latest_policies
from cotune.episodes.rollout import EpisodeBatch
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.integrations.models.transformers.sampler import TransformersSampler
from cotune.reading.evaluations import EvaluatedMode
from cotune.recording.recorder import Nowhere
from cotune.records.structs import PolicyRef
from cotune.records.tasks import as_tasks
from cotune.sampling.protocol import UNSHAPED, SamplingParams
from cotune.sampling.responder import PolicyResponder
from cotune.trainer.evaluation.run import evaluate_episodes
from examples.ablation.plan_path import DEMONSTRATORS, MAX_TOKENS, WORKFLOWS, base, grid

TRAIN_SEED, FRESH_SEED = 100, 900
FULL_LR, LORA_LR = 7e-4, 3e-3
WARM_UP = 520
"""Steps of warm-up: twice the example's, as there are demonstrations for single agents too."""
ROLES = ("navigator", "driver")
BARS = {"team_full": (0.88, 0.82), "team_lora": (0.88, 0.82)}
"""Least mean over the seeds, least value of one seed."""


@dataclass(frozen=True)
class Training:
    """The training of a run: the workflow, the policies (a layout, or the one role that is not frozen), how long."""

    workflow: str
    layout: str = "lora"
    only: str | None = None
    times: int = 1


TRAININGS = {
    "alone_navigator": Training("alone_navigator"),
    "alone_driver": Training("alone_driver"),
    "alone_everything": Training("alone_everything"),
    "alone_everything_3x": Training("alone_everything", times=3),
    "team_lora": Training("team"),
    "team_shared": Training("team", layout="shared"),
    "team_full": Training("team", layout="full"),
    "navigator_only": Training("team", only="navigator"),
    "driver_only": Training("team", only="driver"),
}


@dataclass(frozen=True)
class Row:
    """A line of the table: who plays which role, as (training, role whose policy it is); the base if not listed."""

    title: str
    workflow: str
    players: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def _both(training: str) -> dict[str, tuple[str, str]]:
    return {role: (training, role) for role in ROLES}


ROWS: dict[str, Row] = {
    "alone_untrained": Row("single agent, sees everything, untrained", "alone_everything"),
    "alone_navigator": Row(
        "navigator trained as a single agent, evaluated as one (sees no table)",
        "alone_navigator",
        {"navigator": ("alone_navigator", "navigator")},
    ),
    "alone_driver": Row(
        "driver trained as a single agent, evaluated as one (sees no grid)",
        "alone_driver",
        {"driver": ("alone_driver", "driver")},
    ),
    "alone_together": Row(
        "these two put together in the team",
        "team",
        {"navigator": ("alone_navigator", "navigator"), "driver": ("alone_driver", "driver")},
    ),
    "team_lora": Row("trained together, a LoRA per role", "team", _both("team_lora")),
    "team_swapped": Row(
        "the same, roles swapped",
        "team",
        {"navigator": ("team_lora", "driver"), "driver": ("team_lora", "navigator")},
    ),
    "alone_everything": Row(
        "single agent, sees everything, trained with the same budget",
        "alone_everything",
        {"everything": ("alone_everything", "everything")},
    ),
    "alone_everything_3x": Row(
        "single agent, sees everything, three times the budget",
        "alone_everything",
        {"everything": ("alone_everything_3x", "everything")},
    ),
    "team_untrained": Row("team, untrained", "team"),
    "team_shared": Row("trained together, one shared LoRA", "team", _both("team_shared")),
    "team_full": Row("trained together, all weights, a model per role", "team", _both("team_full")),
    "navigator_only": Row(
        "navigator trained in the team, driver frozen", "team", {"navigator": ("navigator_only", "navigator")}
    ),
    "driver_only": Row("driver trained in the team, navigator frozen", "team", {"driver": ("driver_only", "driver")}),
    "merged": Row(
        "these two put together",
        "team",
        {"navigator": ("navigator_only", "navigator"), "driver": ("driver_only", "driver")},
    ),
}


@dataclass(frozen=True)
class Settings:
    """The part of the benchmark to do, and its folder."""

    out: Path
    steps: int
    tasks_per_step: int
    fresh: int
    warm_up: int
    console: Console

    def folder(self, seed: int) -> Path:
        return self.out / f"seed{seed}"

    def key(self) -> dict[str, int]:
        """The values that results depend on besides row and seed."""
        names = ("steps", "tasks_per_step", "fresh", "warm_up")
        return {name: getattr(self, name) for name in names}


def base_model(settings: Settings, seed: int) -> Path:
    """The base model of a seed, built if it does not exist yet."""
    folder = settings.folder(seed) / f"base-{settings.warm_up}"
    if not (folder / "tokenizer_config.json").is_file():
        settings.console.print(f"seed {seed}: warming up a base model")
        base.build(folder, seed=seed, steps=settings.warm_up, demonstrators=DEMONSTRATORS)
    return folder


def configuration(training: Training, model: Path, settings: Settings, seed: int) -> dict[str, Any]:
    """TrainConfig fields of a run."""
    table: dict[str, Any] = {
        "model": str(model),
        "steps": settings.steps * training.times,
        "tasks_per_step": settings.tasks_per_step,
        "concurrency": 64,
        "seed": seed,
        "checkpoint_every": 10,
        "plan": {"kind": "tree", "k": 8},
        "loss": {"clip_high": 0.28, "entropy": 0.03},
        "lora": {"rank": 16},
        "learner": {
            "lr": FULL_LR if training.layout == "full" else LORA_LR,
            "betas": [0.9, 0.95],
        },
        "schedule": {"kind": "linear"},
        "sampling": {"max_tokens": MAX_TOKENS},
    }
    if training.only is None:
        return {**table, "policies": training.layout}
    kinds = {role: "lora" if role == training.only else "frozen" for role in ROLES}
    return {**table, "policy": [{"name": role, "kind": kind, "roles": [role]} for role, kind in kinds.items()]}


def trained(name: str, settings: Settings, seed: int) -> list[TrainedPolicy]:
    """The policies of a training, run, or resumed if it is not finished."""
    training = TRAININGS[name]
    model = base_model(settings, seed)
    folder = settings.folder(seed) / f"{name}-{settings.steps}x{settings.tasks_per_step}-{settings.warm_up}"
    flow = WORKFLOWS[training.workflow]
    steps = settings.steps * training.times
    tasks = list(grid.make_tasks(steps * settings.tasks_per_step, TRAIN_SEED + seed))
    table = configuration(training, model, settings, seed)
    return latest_policies(train_once(folder, flow, tasks, table, steps, settings.console))


async def play(row: Row, players: Mapping[str, TrainedPolicy], model: Path, settings: Settings) -> EvaluatedMode:
    """Evaluate at temperature 1; roles without a player are the base model's."""
    flow = WORKFLOWS[row.workflow].cotune
    tasks = as_tasks(grid.make_tasks(settings.fresh, FRESH_SEED))
    sampler = await TransformersSampler.open(model)
    try:
        refs = {role: PolicyRef(role) for role in flow.scorers}
        for role, policy in players.items():
            refs[role] = PolicyRef(role, 1)
            assert policy.weights is not None
            await sampler.publish(refs[role], policy.weights, policy.lora if policy.kind == "lora" else None)
        chat = ChatTemplate.load(model)
        responder = PolicyResponder(
            sampler,
            chat,
            refs,
            scorers=flow.scorers,
            defaults=SamplingParams(max_tokens=MAX_TOKENS),
            override={"temperature": 1.0, **UNSHAPED},
            seed=0,
            stream="eval",
        )
        batch = EpisodeBatch(tasks=tasks, sink=Nowhere(), phase="eval")
        return await evaluate_episodes(flow, batch, responder, label="row")
    finally:
        await sampler.aclose()


def result(name: str, settings: Settings, seed: int) -> dict[str, Any]:
    """Train the policies that a row needs, and evaluate it."""
    row = ROWS[name]
    started = time.perf_counter()
    runs = {training: trained(training, settings, seed) for training, _ in row.players.values()}
    players = {
        role: next(policy for policy in runs[training] if whose in policy.roles)
        for role, (training, whose) in row.players.items()
    }
    played = asyncio.run(play(row, players, base_model(settings, seed), settings))
    return {
        "row": name,
        "seed": seed,
        "settings": settings.key(),
        "reached": sum(played.successes.values()),
        "tasks": played.episodes,
        "failed": dict(played.failed),
        "seconds": round(time.perf_counter() - started, 1),
    }


def recorded(path: Path, settings: Settings) -> dict[tuple[str, int], dict[str, Any]]:
    """Results of rows done before under the same settings, by row and seed."""
    if not path.is_file():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {(line["row"], line["seed"]): line for line in lines if line["settings"] == settings.key()}


def summary(results: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By row: share over all tasks of all seeds, and share of each seed."""
    by_row: dict[str, dict[str, Any]] = {}
    results = list(results)
    for name in ROWS:
        lines = sorted((line for line in results if line["row"] == name), key=lambda line: line["seed"])
        tasks = sum(line["tasks"] for line in lines)
        if tasks:
            by_row[name] = {
                "mean": round(sum(line["reached"] for line in lines) / tasks, 4),
                "n": tasks,
                "seeds": {str(line["seed"]): round(line["reached"] / line["tasks"], 4) for line in lines},
            }
    return by_row


def shown(rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """The table of all rows."""
    table = Table(title="Plan-Path: share of fresh tasks whose goal was reached, temperature 1")
    for title in ("row", "success", "by seed"):
        table.add_column(title)
    for name, row in rows.items():
        seeds = ", ".join(f"{value:.1%}" for value in row["seeds"].values())
        table.add_row(
            ROWS[name].title,
            f"{row['mean']:.1%}",
            seeds,
        )
    return table


def bars(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, bool]:
    """Whether the rows that have a bar clear it, on average over the seeds and for each."""
    return {
        name: rows[name]["mean"] >= least and min(rows[name]["seeds"].values()) >= each
        for name, (least, each) in BARS.items()
        if name in rows
    }


def chosen(text: str, known: Sequence[str]) -> list[str]:
    """Names from a comma-separated option."""
    names = text.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    return names


def main() -> None:
    """Run the chosen rows and print all that there are."""
    parser = run_parser(__doc__, "runs/learning")
    parser.add_argument("--rows", default=",".join(ROWS), help=f"comma-separated; default all: {', '.join(ROWS)}")
    parser.add_argument("--steps", type=int, default=50, help="training steps (default: %(default)s)")
    parser.add_argument("--tasks-per-step", type=int, default=48)
    parser.add_argument("--tasks", type=int, default=1000, help="fresh tasks per row (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help="steps of warm-up (default: %(default)s)")
    options = parser.parse_args()
    console = Console(stderr=True)
    settings = Settings(options.out, options.steps, options.tasks_per_step, options.tasks, options.warm_up, console)
    rows = chosen(options.rows, list(ROWS))
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "results.jsonl"
    for seed in map(int, options.seeds.split(",")):
        for name in rows:
            if (name, seed) not in recorded(path, settings):
                line = result(name, settings, seed)
                console.print(f"seed {seed}: {name} {line['reached']}/{line['tasks']} in {line['seconds']:.0f} s")
                with path.open("a") as file:
                    file.write(json.dumps(line) + "\n")
    rows_summary = summary(recorded(path, settings).values())
    Console(width=160).print(shown(rows_summary))
    print("Calls go through the OpenAI SDK, without LangGraph; prompts and rules are the example's.")
    print(f"Settings: {settings.key()}")
    print(json.dumps({"rows": rows_summary, "bars": bars(rows_summary)}))


if __name__ == "__main__":
    main()
