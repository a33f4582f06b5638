"""Train the single agents and the team of a configuration for several seeds, and write the ablation table.

    python -m examples.ablation examples/ablation/plan_path.toml --out runs/ablation

For each seed, every single agent and the team with a shared LoRA, a LoRA per role and a model per role are trained.
Each is evaluated on the same held-out tasks: alone, put together in the team, and with the policies exchanged. Says
first how many episodes that takes. Stopped, the same command continues: runs resume, evaluations that are done are kept
in OUT/results.jsonl. Writes OUT/ablation.md and OUT/ablation.json; the last line is the same JSON.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import fmean

import msgspec
from rich.console import Console

import cotune
from cotune.config.train import TrainConfig
from cotune.errors import ConfigError, CotuneError
from cotune.records.tasks import load_tasks
from cotune.terminal import ask_yes_no
from examples.ablation.plan import (
    Ablation,
    Row,
    Training,
    digest_of,
    file_digest,
    merged,
    read_ablation,
    rows,
    trainings,
)
from examples.ablation.table import Line, Result, lines, markdown

console = Console(stderr=True, soft_wrap=True)
FINISHED = "ablation.finished"
"""File in the folder of a run that has finished."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="TOML file, as examples/ablation/plan_path.toml")
    parser.add_argument("--out", type=Path, default=Path("runs/ablation"), help="folder (default: %(default)s)")
    parser.add_argument("--yes", action="store_true", help="begin without asking")
    options = parser.parse_args()
    try:
        ablation = read_ablation(options.config)
        console.print(cost(ablation, options.config.parent))
        if not options.yes and not agreed():
            return 1
        table = run(ablation, options.config.parent, options.out)
    except CotuneError as error:
        console.print(f"error: {error}", markup=False)
        return 2
    except KeyboardInterrupt:
        console.print("Stopped. The same command continues.")
        return 130
    (options.out / "ablation.md").write_text(markdown(table))
    text = msgspec.json.encode(table).decode()
    (options.out / "ablation.json").write_text(text + "\n")
    print(markdown(table))
    print(text)
    return 0


def agreed() -> bool:
    """Whether the user wants to begin. Without a terminal nobody can be asked."""
    if not sys.stdin.isatty():
        console.print("Nobody can be asked here: pass --yes to begin.")
        return False
    return ask_yes_no("Begin? [y/N] ", default=False)


def cost(ablation: Ablation, folder: Path) -> str:
    """Return the numbers of runs and episodes of the ablation."""
    seeds, runs = len(ablation.seeds), trainings(ablation, folder)
    episodes = 0
    for training in runs:
        config = TrainConfig(
            **{name: training.settings[name] for name in ("steps", "tasks_per_step") if name in training.settings}
        )
        episodes += config.steps * config.tasks_per_step
    evaluated = len(rows(ablation)) * len(load_tasks(folder / ablation.held_out))
    return (
        f"{seeds} seeds x {len(runs)} runs: {seeds * episodes:,} episodes of training (each with the candidates of its "
        f"plan), and {seeds * evaluated:,} of evaluation."
    )


def run(ablation: Ablation, folder: Path, out: Path) -> list[Line]:
    """Train and evaluate the missing runs, seed by seed. Returns the table."""
    out.mkdir(parents=True, exist_ok=True)
    earlier = read_results(out)
    results: dict[tuple[str, int], Result] = {}
    table = rows(ablation)
    runs = {training.name: training for training in trainings(ablation, folder)}
    held_out = folder / ablation.held_out
    for seed in ablation.seeds:
        digests = {name: training.digest(seed) for name, training in runs.items()}
        trained: dict[str, Path] = {}
        for row in table:
            # Results of another configuration stay in the file, and are not used.
            players_digests = {role: digests[name] for role, name in row.players.items()}
            digest = digest_of([row.workflow, row.mode, players_digests, file_digest(held_out), seed])
            if digest in earlier:
                results[row.name, seed] = earlier[digest]
                continue
            started = time.perf_counter()
            for name in row.players.values():
                if name not in trained:
                    trained[name] = train_once(runs[name], seed, out)
            players = {role: trained[name] for role, name in row.players.items()}
            result = evaluated(row, players, held_out, seed, digest)
            write_result(out, result)
            results[row.name, seed] = result
            console.print(
                f"seed {seed}, {row.title}: {result.figure} {fmean(result.by_task.values()):.3f} "
                f"({time.perf_counter() - started:.0f} s)"
            )
    return lines(table, results)


def train_once(training: Training, seed: int, out: Path) -> Path:
    """The folder of a finished run; trains or resumes it first. Raises ConfigError if it was stopped.

    The folder's name has the digest of the run, so that a changed configuration trains a new one.
    """
    run = out / f"seed{seed}" / f"{training.name}-{training.digest(seed)}"
    if is_finished(run):
        return run
    if (run / "run.json").is_file():
        summary = cotune.resume(run, console=console)
    else:
        console.print(f"seed {seed}: training {training.name}")
        settings = merged(training.settings, {"seed": seed, "evaluation": {"tasks": "none"}})
        summary = cotune.train(training.workflow, training.tasks, settings, out=run, console=console)
    if not summary.finished:
        raise ConfigError("run", str(run), "was stopped", "Give the same command again to continue.")
    (run / FINISHED).touch()
    return run


def is_finished(run: Path) -> bool:
    """Whether `train_once` has seen the run finish. Resuming a finished run would load its models for nothing."""
    return (run / FINISHED).is_file()


def evaluated(row: Row, players: dict[str, Path], held_out: Path, seed: int, digest: str) -> Result:
    """Play a row on the held-out tasks. Calls at the same place draw the same random numbers in all rows."""
    whole_team = list(players) == ["*"]
    source = players["*"] if whole_team else players
    report = cotune.evaluate(source, row.workflow, held_out, modes=(row.mode,), seed=seed)
    (mode,) = report.evaluations.values()
    successes = mode.successes
    return Result(
        row=row.name,
        seed=seed,
        digest=digest,
        figure="success" if successes else "reward",
        by_task=successes or mode.rewards,
        calls=mode.use.calls / mode.episodes,
        failed=mode.failures,
    )


def read_results(out: Path) -> dict[str, Result]:
    """The evaluations of earlier calls, by their digests."""
    path = out / "results.jsonl"
    if not path.is_file():
        return {}
    results: dict[str, Result] = {}
    for line in path.read_bytes().splitlines():
        result = msgspec.json.decode(line, type=Result)
        results[result.digest] = result
    return results


def write_result(out: Path, result: Result) -> None:
    with (out / "results.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(result) + b"\n")


if __name__ == "__main__":
    sys.exit(main())
