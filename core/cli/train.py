"""The commands around training: `cotune check`, `doctor`, `trace`, `train` and `eval`."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from cotune.cli.command import (
    APP,
    TASKS,
    add_command,
    add_repeated,
    add_trust,
    prices,
    printing_aside,
    settings,
)
from cotune.cli.fields import RUN, add_fields, given
from cotune.cli.options import TraceOptions
from cotune.errors import ConfigError
from cotune.storage.checkpoints import read_best
from cotune.storage.run_layout import RunLayout, read_config, read_run_json
from cotune.storage.whole_file import whole_file
from cotune.terminal import progress, tell, terminal

if TYPE_CHECKING:
    from cotune.trainer.reporting.summary import RunSummary


def add_check(commands: Any) -> None:
    """Add `cotune check`."""

    def run(a: argparse.Namespace) -> int:
        from cotune.trainer.before.check.dry_run import check
        from cotune.trainer.before.check.report import render
        from cotune.trainer.config.train import load_config

        config = load_config(a.config, {"model": "none", **given(a), **settings(a.set)})
        bounds = {"limit": a.limit, "calls": a.calls, "timeout": a.timeout}
        with printing_aside() if a.json else nullcontext(), progress() as say:
            report = check(
                a.workflow,
                a.tasks,
                config,
                model=a.model,
                answers=a.answer,
                call_tools=not a.no_tools,
                say=say,
                **bounds,
            )
        if a.json in (None, "-"):
            print(report.to_json()) if a.json else terminal().print(render(report))
        else:
            with whole_file(a.json) as file:
                file.write(f"{report.to_json()}\n".encode())
        return {"trainable": 0, "undecided": 3}.get(report.verdict, 1)

    text = "run an application on a task with made-up answers and say what would be trained, and what not and why"
    example = "cotune check app:solve --tasks tasks.jsonl"
    command = add_command(commands, "check", run, text, example, extra="train")
    command.add_argument("workflow", help=APP)
    command.add_argument("--tasks", required=True, help=TASKS)
    command.add_argument("--limit", type=int, default=1, help="take the first N tasks (default: %(default)s)")
    command.add_argument("--config", help="TOML file of the training run; see docs/reference/configuration.md")
    tokens = "count tokens with this model's tokenizer; it is not loaded"
    add_fields(command, "model", "policies", "plan.kind", "plan.k", "recipe", "roles_by", model=tokens)
    add_repeated(command, "--set", "FIELD=VALUE", "as in cotune train")
    add_repeated(command, "--answer", "TEXT", "a text that the made-up answers use, in turn")
    command.add_argument("--no-tools", action="store_true", help="never answer with a tool call: no tool is run")
    command.add_argument("--calls", type=int, default=64, help="most calls of an episode (default: %(default)s)")
    command.add_argument("--timeout", type=float, default=60.0, help="seconds for one episode (default: %(default)s)")
    command.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write the report as JSON to FILE, or alone to standard output; what the application prints goes to "
        "standard error",
    )


def add_doctor(commands: Any) -> None:
    """Add `cotune doctor`."""

    def run(a: argparse.Namespace) -> int:
        from cotune.trainer.before.doctor.doctor import examine, render
        from cotune.trainer.before.doctor.memory import render_memory
        from cotune.trainer.config.train import load_config

        flags = {**given(a), **settings(a.set)}
        config = load_config(a.config, flags) if a.config or a.model else None
        if a.run_folder is not None:
            config = load_config(None, {**read_config(a.run_folder), **flags})
        if config is None and "cluster.address" in flags:
            raise ConfigError("model", None, "must be given where --cluster is", "Pass --model or --config.")
        report = examine(config, prompt=a.prompt_tokens)
        if a.json:
            print(report.to_json())
        else:
            terminal().print(render(report))
            if report.memory:
                terminal().print(render_memory(report.memory))
            tell("a run can start" if report.fits else "a run cannot start: see what blocks it")
        return 0 if report.fits else 1

    text = "look at this machine or a Ray cluster and say whether a configuration fits; starts nothing"
    command = add_command(commands, "doctor", run, text, "cotune doctor --config train.toml --cluster local")
    add_trust(command)
    command.add_argument("--config", help="TOML file of the training run; see docs/reference/configuration.md")
    add_fields(command, "model", "cluster.address")
    add_repeated(command, "--set", "FIELD=VALUE", "as in cotune train")
    command.add_argument("--run", dest="run_folder", metavar="RUN", help="the configuration of this run")
    command.add_argument(
        "--prompt-tokens",
        type=int,
        default=512,
        metavar="N",
        help="length of the longest prompt that memory is reckoned for (default: %(default)s)",
    )
    command.add_argument("--json", action="store_true", help="print the report as JSON")


def add_trace(commands: Any) -> None:
    """Add `cotune trace`."""

    def run(a: argparse.Namespace) -> int:
        from cotune.cli.trace import trace

        return trace(a.workflow, a.tasks, a.out, TraceOptions(**given(a)))

    text = "record episodes of an application with the model that it uses today"
    command = add_command(commands, "trace", run, text, "cotune trace app:solve --tasks tasks.jsonl --out runs/traced")
    command.add_argument("workflow", help=APP)
    command.add_argument("--tasks", required=True, help=TASKS)
    command.add_argument(
        "--out", default="runs/trace", help="run folder; records are added to it (default: %(default)s)"
    )
    add_fields(command, *TraceOptions.__struct_fields__, table=TraceOptions)


def add_train(commands: Any) -> None:
    """Add `cotune train`."""
    text = "train the policies of an application's roles"
    example = "cotune train app:solve --tasks tasks.jsonl --model base/"
    command = add_command(commands, "train", _run_train, text, example, extra="train")
    add_trust(command)
    command.add_argument("workflow", nargs="?", help=APP)
    command.add_argument("--tasks", help=TASKS)
    command.add_argument("--config", help="TOML file; see docs/reference/configuration.md. Flags go before it")
    add_fields(command, *RUN)
    add_repeated(command, "--set", "FIELD=VALUE", "any other field, such as lora.rank=8 or schedule.kind=linear")
    command.add_argument("--out", help="run folder (default: runs/DATE-TIME)")
    command.add_argument(
        "--explain", action="store_true", help="say what each column and figure of a step tells, and train nothing"
    )
    command.add_argument(
        "--resume",
        metavar="RUN",
        help="go on with a stopped, killed or finished run, under its own configuration; settings that are safe to "
        "change (--steps, --tasks-per-step, memory, machines, ...) may be given, others are refused; see "
        "docs/reference/run-folder.md",
    )


def _run_train(a: argparse.Namespace) -> int:
    if a.explain:
        from cotune.trainer.reporting.columns import explained

        terminal().print(*explained(), sep="\n")
        return 0
    tell(f"opening the run {a.resume} ..." if a.resume else f"loading {a.workflow} ...")
    from cotune.reading.words import change_text
    from cotune.tables import plural
    from cotune.trainer.config.train import load_config, read_toml
    from cotune.trainer.train import resume, train

    fields = {**given(a), **settings(a.set)}
    if a.resume:
        if a.out is not None:
            raise ConfigError("out", a.out, "must be left out with --resume, which names the run", "Leave out --out.")
        changes = {**read_toml(a.config), **fields}
        summary = resume(a.resume, workflow=a.workflow, tasks=a.tasks, changes=changes)
    else:
        if a.workflow is None:
            raise ConfigError("workflow", None, "must be given, unless --resume is", "See cotune train --help.")
        summary = train(a.workflow, a.tasks, load_config(a.config, fields), run=a.out)
    state = "finished" if summary.finished else "stopped"
    tell(f"{state} after {summary.steps} steps in {summary.seconds:.0f} s: {summary.path}")
    shown = [change for change in summary.headline.changes if change.kind not in ("training", "selected")]
    for change in shown:
        tell(change_text(change))
    if found := summary.headline.evaluation:
        tell(f"{summary.headline.verdict or 'no verdict'} ({found.name})")
    for text in never_updated(summary):
        tell(text)
    for role, steps in summary.silent.items():
        tell(f"{role} called in no episode of the last {plural(steps, 'step')}: docs/how-to/not-learning.md")
    if summary.finished and summary.versions:
        app = a.workflow or read_run_json(summary.path)["workflow"] or "WORKFLOW"
        tell(f"next: cotune eval {app} --run {summary.path} --tasks {summary.held_out or 'HELD_OUT.jsonl'}")
        best = " --best" if read_best(RunLayout(summary.path).checkpoints) else ""
        tell(f"then: cotune export {summary.path} --to adapters/{best}; to look at it: cotune view {summary.path}")
    return 0 if summary.finished else 130


def never_updated(summary: RunSummary) -> list[str]:
    """Which policies no step of a run has updated, why, and what to do about those without a signal."""
    from cotune.reading.words import stayed_text
    from cotune.trainer.reporting.summary import NO_SIGNAL

    if not summary.stayed:
        return []
    silent = [policy for policy, reasons in summary.stayed.items() if next(iter(reasons)) == "no signal"]
    told = ", ".join(f"{policy} ({stayed_text(reasons)})" for policy, reasons in summary.stayed.items())
    return [f"never updated: {told}", *([f"{', '.join(silent)}: {NO_SIGNAL}"] if silent else [])]


def add_eval(commands: Any) -> None:
    """Add `cotune eval`."""
    from cotune.trainer.evaluation.modes import EvaluationOptions

    def run(a: argparse.Namespace) -> int:
        tell(f"loading {a.workflow} and {a.run_folder} ...")
        from cotune.trainer.evaluation.evaluate import evaluate
        from cotune.trainer.evaluation.report import render

        settings = {"modes": tuple(a.modes.split(",")), "prices": prices(a.price), **given(a)}
        report = evaluate(a.run_folder, a.workflow, a.tasks, **settings)
        terminal().print(render(report))
        if report.stored:
            tell(f"stored in {report.stored}; to look at it: cotune view {a.run_folder}")
        return 1 if report.broken else 0

    text = "evaluate trained policies against the base, with confidence intervals"
    example = "cotune eval app:solve --tasks held_out.jsonl --run runs/r1"
    command = add_command(commands, "eval", run, text, example, extra="train")
    add_trust(command)
    command.add_argument("workflow", help=APP)
    command.add_argument("--tasks", required=True, help=TASKS)
    command.add_argument("--run", dest="run_folder", required=True, help="run folder or export")
    command.add_argument(
        "--modes",
        default="base,trained,base_greedy,greedy,swapped",
        help="any of base, trained (temperature 1), base_greedy, greedy, base_as_deployed, as_deployed (at what the "
        "application asks for), swapped (policies of the roles exchanged), today (its own provider, which is asked "
        "and paid as ever); default: %(default)s",
    )
    text = "what a million prompt and completion tokens of a model cost (or of a policy, by its name)"
    add_repeated(command, "--price", "MODEL=IN/OUT", text)
    options = ("model", "limit", "samples", "concurrency", "timeout", "out", "roles_by", "records")
    add_fields(command, *options, table=EvaluationOptions)
