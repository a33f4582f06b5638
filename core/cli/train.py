"""`cotune train`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from cotune.cli.command import APP, TASKS, Parser, add_fields, add_repeated, add_trust_folder, fields_of, parse_settings
from cotune.errors import ConfigError
from cotune.terminal import tell, terminal

if TYPE_CHECKING:
    from cotune.trainer.reporting.summary import RunSummary

EXAMPLE = "cotune train app:solve --tasks tasks.jsonl --model Qwen/Qwen3-1.7B"
EXTRA = "train"


def arguments(command: Parser) -> None:
    """Add the arguments of `cotune train`. Fields of the configuration become flags; --set reaches all others."""
    command.add_argument("workflow", nargs="?", help=APP)
    command.add_argument("--tasks", metavar="FILE", help=TASKS)
    command.add_argument(
        "--config", metavar="FILE", help="TOML file; see docs/reference/configuration.md. Flags override it"
    )
    add_fields(command, "model", "policies", "plan.kind", "plan.k", "recipe", "steps", "tasks_per_step", "learner.lr")
    add_fields(command, "prompts_file", "init", "records.path", "evaluation.tasks", "cluster.address")
    add_repeated(
        command,
        "--set",
        "FIELD=VALUE",
        "set any other field of the configuration, such as lora.rank=8 or schedule.kind=linear",
    )
    command.add_argument("--out", metavar="DIR", help="new run folder (default: runs/DATE-TIME)")
    command.add_argument(
        "--resume",
        metavar="RUN",
        help="continue a stopped, killed or finished run under its own configuration. This runs the application and "
        "the functions that the run names. You may change settings that are safe to change (--steps, --tasks-per-step, "
        "memory, machines, ...); see docs/reference/run-folder.md",
    )
    command.add_argument(
        "--profile",
        action="store_true",
        help="write a trace of one step with torch's profiler, and print its path; see docs/how-to/profile.md",
    )
    command.add_argument(
        "--explain", action="store_true", help="explain each column and figure of a step, without training"
    )
    add_trust_folder(command, "the run of --resume")


def run(a: argparse.Namespace) -> int:
    """Train a workflow, or continue a run with --resume, and print what was reached. Exit status: 130 if it was
    stopped.
    """
    if a.explain:
        from cotune.trainer.reporting.columns import explain_columns

        terminal().print(*explain_columns(), sep="\n")
        return 0
    if a.resume or a.workflow:
        tell(f"opening the run {a.resume} ..." if a.resume else f"loading {a.workflow} ...")
    from cotune.trainer.config.load import load_config, read_toml
    from cotune.trainer.train import resume, train

    fields = {**fields_of(a), **parse_settings(a.set)}
    if not a.resume and a.workflow is None:
        remedy = "Name one, as in cotune train app:solve --tasks tasks.jsonl, or pass --resume RUN."
        raise ConfigError("workflow", None, "is missing", remedy)
    if a.resume:
        if a.out is not None:
            raise ConfigError("out", a.out, "cannot be used with --resume, which names the run", "Leave out --out.")
        changes = {**read_toml(a.config), **fields}
        summary = resume(a.resume, workflow=a.workflow, tasks=a.tasks, changes=changes, profile=a.profile)
    else:
        summary = train(a.workflow, a.tasks, load_config(a.config, fields), out=a.out, profile=a.profile)
    _tell_summary(summary)
    a.result = summary
    return 0 if summary.finished else 130


def _tell_summary(summary: RunSummary) -> None:
    """Print what a run has reached, and the policies and roles that did not take part."""
    from cotune.reading.words import change_text
    from cotune.tables import plural

    state = "finished" if summary.finished else "stopped"
    tell(f"{state} after {plural(summary.steps, 'step')} in {summary.seconds:.0f} s: {summary.path}")
    for change in summary.headline.changes:
        if change.kind not in ("training", "selected"):
            tell(change_text(change))
    if evaluation := summary.headline.evaluation:
        tell(f"{summary.headline.verdict or 'no verdict'} ({evaluation.name})")
    for text in never_updated(summary):
        tell(text)
    for role, steps in summary.silent.items():
        tell(f"{role} called in no episode of the last {plural(steps, 'step')}: docs/how-to/not-learning.md")


def never_updated(summary: RunSummary) -> list[str]:
    """The lines to print about policies that no step has updated: the reasons, and a remedy for policies without a
    signal."""
    from cotune.reading.words import stayed_text
    from cotune.trainer.reporting.summary import NO_SIGNAL

    if not summary.stayed:
        return []
    policies: list[str] = []
    without_signal: list[str] = []
    for policy, reasons in summary.stayed.items():
        policies.append(f"{policy} ({stayed_text(reasons)})")
        commonest = next(iter(reasons))
        if commonest == "no signal":
            without_signal.append(policy)
    texts = [f"never updated: {', '.join(policies)}"]
    if without_signal:
        texts.append(f"{', '.join(without_signal)}: {NO_SIGNAL}")
    return texts
