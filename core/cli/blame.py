"""`cotune blame`."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING

from cotune.cli.command import APP, TASKS, Parser, add_fields, add_repeated, fields_of, parse_prices, printing_aside
from cotune.errors import ConfigError
from cotune.terminal import ask_yes_no, tell, terminal

if TYPE_CHECKING:
    from cotune.trainer.blame.options import BlameOptions

EXAMPLE = (
    "cotune blame app:solve --tasks tasks.jsonl --reference openai:gpt-5\n"
    "  cotune blame app:solve --tasks tasks.jsonl --without checker\n"
    "  cotune blame app:solve --episodes runs/traced"
)
EXTRA = "train"


def arguments(command: Parser) -> None:
    """Add the arguments of `cotune blame`. Fields of BlameOptions become flags with the help texts of the reference."""
    from cotune.trainer.blame.options import BlameOptions

    command.add_argument("workflow", help=APP)
    command.add_argument("--tasks", metavar="FILE", help=f"{TASKS}; not with recorded --episodes")
    text = (
        "answer in place of a role with openai:NAME, a model, run or export on this machine, or prompts:FOLDER; "
        "ROLE=... for one role only"
    )
    add_repeated(command, "--reference", "WHO", text)
    text = "test whether a role is needed: it answers nothing, or always TEXT"
    add_repeated(command, "--without", "ROLE[=TEXT]", text)
    limits = ("max_calls", "max_cost", "limit", "runs")
    add_fields(command, "episodes", "out", *limits, table=BlameOptions)
    add_fields(command, "model", "temperature", "tools", "roles_by", table=BlameOptions)
    text = "price of a million prompt and completion tokens of a model, or of a policy by its name"
    add_repeated(command, "--price", "MODEL=PROMPT/COMPLETION", text)
    command.add_argument("--yes", action="store_true", help="run without a question")
    command.add_argument("--json", action="store_true", help="print the result as JSON")


def run(a: argparse.Namespace) -> int:
    """Find the role that is at fault for failed episodes, and print the result.

    The runs cost calls of models, so their number is shown and confirmed first. Returns 1 if the user declines.
    """
    from cotune.trainer.blame.analysis import blame, planned
    from cotune.trainer.blame.options import BlameOptions
    from cotune.trainer.blame.references import read_references
    from cotune.trainer.blame.report import render
    from cotune.trainer.blame.tasks import tasks_to_analyse

    options = BlameOptions(
        references=tuple(a.reference), without=tuple(a.without), prices=parse_prices(a.price), **fields_of(a)
    )
    read_references(options)
    with printing_aside() if a.json else nullcontext():
        tasks = len(tasks_to_analyse(a.tasks, options).tasks)
        if not _may_begin(planned(tasks, options), options, yes=a.yes):
            tell("nothing is run")
            return 1
        try:
            result = blame(a.workflow, a.tasks, options)
        except KeyboardInterrupt:
            tell("finished runs are stored; to continue, run the same command again")
            raise
    a.result = result
    if a.json:
        print(json.dumps(result.to_json()))
    else:
        terminal().print(render(result))
    return 0


def _may_begin(plan: str, options: BlameOptions, *, yes: bool) -> bool:
    """Whether the runs may begin: with `yes` or a limit, or after an answer at the terminal. Raises ConfigError if
    there is no terminal to ask at."""
    tell(plan)
    if yes or options.max_calls is not None or options.max_cost is not None:
        return True
    remedy = "Name a limit, --max-calls or --max-cost, or agree with --yes."
    if not sys.stdin.isatty():
        raise ConfigError("max_calls", None, "is missing, and there is no terminal to ask at", remedy)
    return ask_yes_no("Go on? [y/N] ", default=False)
