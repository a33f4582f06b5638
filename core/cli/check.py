"""`cotune check`."""

from __future__ import annotations

import argparse
from contextlib import nullcontext

from cotune.cli.command import APP, TASKS, Parser, add_fields, add_repeated, fields_of, parse_settings, printing_aside
from cotune.storage.whole_file import whole_file
from cotune.terminal import progress, terminal

EXAMPLE = "cotune check app:solve --tasks tasks.jsonl"
EXTRA = "train"
EXTRA_FOR = "--model"


def arguments(command: Parser) -> None:
    """Add the arguments of `cotune check`. Fields of the configuration become flags, as in `cotune train`."""
    command.add_argument("workflow", help=APP)
    command.add_argument("--tasks", required=True, metavar="FILE", help=TASKS)
    command.add_argument("--limit", type=int, default=1, metavar="N", help="take the first N tasks (default: 1)")
    command.add_argument("--config", metavar="FILE", help="TOML file of a run; see docs/reference/configuration.md")
    edits = "file of edited prompts, or a folder that has one: report which of its parts occur in the calls"
    tokens = "count tokens with this model's tokenizer; it is not loaded"
    names = ("model", "policies", "plan.kind", "plan.k", "recipe", "prompts_file")
    add_fields(command, *names, model=tokens, prompts_file=edits)
    add_repeated(command, "--set", "FIELD=VALUE", "set any other field of the configuration, as in cotune train")
    command.add_argument(
        "--answers",
        metavar="WHO",
        help="take answers from a small model (folder or Hugging Face id), from provider (the application's own) or "
        "from records:ADDRESS (recorded answers); by default answers are drawn and no provider is contacted",
    )
    command.add_argument("--no-tools", action="store_true", help="drawn answers call no tool: no tool is run")
    command.add_argument(
        "--calls", type=int, default=64, metavar="N", help="maximum calls of one run (default: %(default)s)"
    )
    command.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS", help="time for one run (default: %(default)s)"
    )
    command.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write the report as JSON to FILE, or without FILE to standard output; the application's own output goes "
        "to standard error",
    )


def run(a: argparse.Namespace) -> int:
    """Run the workflow without training, and report whether it can be trained.

    With --json, the application's own output goes to standard error, so that standard output has only the report. Exit
    status: 0 trainable, 3 undecided, 1 not trainable.
    """
    from cotune.trainer.before.check.dry_run import check
    from cotune.trainer.before.check.report import CheckLimits, render
    from cotune.trainer.config.load import load_config, read_toml

    # A check needs no model, but a configuration does. For the name `none`, no model is looked for.
    model = read_toml(a.config).get("model", "none")
    config = load_config(a.config, {"model": model, **fields_of(a), **parse_settings(a.set)})
    with printing_aside() if a.json else nullcontext(), progress() as say:
        report = check(
            a.workflow,
            a.tasks,
            config,
            model=a.model,
            answers=a.answers,
            call_tools=not a.no_tools,
            limits=CheckLimits(limit=a.limit, calls=a.calls, timeout=a.timeout),
            say=say,
        )
    if a.json is None:
        terminal().print(render(report))
    elif a.json == "-":
        print(report.to_json())
    else:
        with whole_file(a.json) as file:
            file.write(f"{report.to_json()}\n".encode())
    return {"trainable": 0, "undecided": 3}.get(report.verdict, 1)
