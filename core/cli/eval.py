"""`cotune eval`."""

from __future__ import annotations

import argparse
from typing import Literal

from cotune.cli.command import (
    APP,
    TASKS,
    Parser,
    add_fields,
    add_moved,
    add_repeated,
    add_trust_folder,
    add_use,
    fields_of,
    parse_moved_models,
    parse_prices,
)
from cotune.errors import ConfigError
from cotune.terminal import tell, terminal

EXAMPLE = "cotune eval app:solve --tasks held_out.jsonl --run runs/r1"
EXTRA = "train"


def arguments(command: Parser) -> None:
    """Add the arguments of `cotune eval`. Fields of EvaluationOptions become flags with the help texts of the
    reference.
    """
    from cotune.trainer.evaluation.modes import EvaluationOptions

    command.add_argument("workflow", nargs="?", help=f"{APP} (default: the workflow of --run)")
    command.add_argument("--tasks", metavar="FILE", help=f"{TASKS} (default: the tasks that --run held out)")
    command.add_argument("--run", metavar="RUN", help="run folder (RUN#STEP: one of its checkpoints) or export")
    text = "compare --run with another run (RUN#STEP: one of its checkpoints), export or model, instead of the modes"
    command.add_argument("--against", metavar="RUN", help=text)
    add_use(command, "--run")
    text = "instead of --run: an untrained model, which plays every role. Several are compared with the first"
    add_repeated(command, "--base", "FOLDER_OR_ID", text)
    command.add_argument(
        "--pairs",
        nargs="?",
        type=int,
        const=EvaluationOptions().max_episodes,
        metavar="N",
        help="with --base: evaluate all assignments of the models to roles, if that takes at most N episodes (default: "
        "%(const)s); prints the number first",
    )
    command.add_argument(
        "--modes",
        help="any of base (the untrained model), trained, swapped (policies of the roles exchanged), today (the "
        "application's present model with its own prompts, which is asked and paid); default: base,trained,swapped, or "
        "base with --base",
    )
    command.add_argument(
        "--temperature",
        type=_parse_temperature,
        metavar="N|app",
        help="sampling temperature of all modes except today, or app: as the application asks (default: app if today "
        "is one of the modes, otherwise 1)",
    )
    text = "price of a million prompt and completion tokens of a model, or of a policy by its name"
    add_repeated(command, "--price", "MODEL=PROMPT/COMPLETION", text)
    add_moved(command, "run or export")
    options = ("samples", "concurrency", "timeout", "out", "roles_by", "prompts", "records")
    add_fields(command, *options, table=EvaluationOptions)
    add_trust_folder(command, "RUN")


def _parse_temperature(text: str) -> float | Literal["app"]:
    return "app" if text == "app" else float(text)


def run(a: argparse.Namespace) -> int:
    """Evaluate a run, an export, a team or base models on tasks, and print the report.

    Exactly one of --run, --use and --base says what is evaluated. Only a run has a workflow and held-out tasks of its
    own; with the others, both must be named. Exit status: 1 if the evaluation was broken off.
    """
    _check_source(a)
    tell(f"loading {a.workflow or 'the workflow'} and {a.run or ', '.join(a.use or a.base)} ...")
    from cotune.trainer.evaluation.evaluate import evaluate
    from cotune.trainer.evaluation.report import render
    from cotune.trainer.evaluation.sources import split_assignments
    from cotune.trainer.evaluation.subject import tasks_of_run, workflow_of_run

    tasks = a.tasks or tasks_of_run(a.run)
    workflow = a.workflow or workflow_of_run(a.run)
    source = split_assignments(a.use, "--use") if a.use else a.run
    settings = {
        "modes": tuple(a.modes.split(",")) if a.modes is not None else None,
        "bases": tuple(a.base),
        "against": a.against,
        "temperature": a.temperature,
        "prices": parse_prices(a.price),
        "model": parse_moved_models(a.model),
        **fields_of(a),
    }
    if a.pairs is not None:
        settings |= {"pairs": True, "max_episodes": a.pairs}
    report = evaluate(source, workflow, tasks, **settings)
    terminal().print(render(report))
    if report.stored:
        tell(f"stored in {report.stored}")
    a.result = report
    return 1 if report.broken else 0


def _check_source(a: argparse.Namespace) -> None:
    """Raise ConfigError unless one source is named, and with it the workflow and the tasks that it needs."""
    source_flags = [flag for flag, value in (("--run", a.run), ("--use", a.use), ("--base", a.base)) if value]
    remedy = "Name a run or an export (--run), a team (--use ROLE=SOURCE), or base models (--base)."
    if not source_flags:
        raise ConfigError("--run", None, "is missing", remedy)
    if len(source_flags) > 1:
        fault = f"cannot be combined with {' and '.join(source_flags[1:])}"
        raise ConfigError(source_flags[0], None, fault, remedy)
    for name, value in (("workflow", a.workflow), ("--tasks", a.tasks)):
        if value is None and a.run is None:
            remedy = "For example: cotune eval app:solve --tasks held_out.jsonl --base models/Qwen3-1.7B"
            raise ConfigError(name, None, f"is missing: {source_flags[0]} needs it", remedy)
