"""`cotune eval`."""

from __future__ import annotations

import argparse

from cotune.cli.command import (
    APP,
    TASKS,
    Parser,
    add_fields,
    add_moved,
    add_repeated,
    add_trust,
    fields_of,
    moved,
    prices,
)
from cotune.terminal import tell, terminal

EXAMPLE = "cotune eval app:solve --tasks held_out.jsonl --run runs/r1"
EXTRA = "train"


def arguments(command: Parser) -> None:
    from cotune.trainer.evaluation.modes import EvaluationOptions

    command.add_argument("workflow", help=APP)
    command.add_argument("--tasks", required=True, metavar="FILE", help=TASKS)
    command.add_argument("--run", required=True, metavar="RUN", help="run folder or export")
    command.add_argument(
        "--modes",
        default="base,trained,base_greedy,greedy,swapped",
        help="any of base, trained (temperature 1), base_greedy, greedy, base_as_deployed, as_deployed (with the "
        "sampling that the application asks for), swapped (policies of the roles exchanged), today (the application's "
        "own provider, which is asked and paid), as_written (base with the application's own prompts, where there are "
        "edited ones); default: %(default)s",
    )
    text = "price of a million prompt and completion tokens of a model, or of a policy by its name"
    add_repeated(command, "--price", "MODEL=PROMPT/COMPLETION", text)
    add_moved(command, "run or export")
    options = ("limit", "samples", "concurrency", "timeout", "out", "roles_by", "prompts", "records")
    add_fields(command, *options, table=EvaluationOptions)
    add_trust(command)


def run(a: argparse.Namespace) -> int:
    tell(f"loading {a.workflow} and {a.run} ...")
    from cotune.trainer.evaluation.evaluate import evaluate
    from cotune.trainer.evaluation.report import render

    settings = {"modes": tuple(a.modes.split(",")), "prices": prices(a.price), "model": moved(a.model), **fields_of(a)}
    report = evaluate(a.run, a.workflow, a.tasks, **settings)
    terminal().print(render(report))
    if report.stored:
        tell(f"stored in {report.stored}")
    a.result = report
    return 1 if report.broken else 0
