"""`cotune records score`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from cotune.cli.command import APP, RECORDS, Parser, add_fields, add_trust_folder
from cotune.episodes.rescore import Rescoring, rescore
from cotune.episodes.run_sync import run_sync
from cotune.episodes.workflows import load_workflow
from cotune.errors import ConfigError
from cotune.runtime.run_context import RunContext, current_run
from cotune.storage.open_store import folder_of, is_path, open_store
from cotune.storage.run_code import redactor_of
from cotune.tables import grid, plural
from cotune.terminal import tell, terminal

if TYPE_CHECKING:
    from rich.console import Group


TEXT = "Score recorded calls with the application's present scorers and judge"
EXAMPLE = "cotune records score runs/traced app:solve --write"


def arguments(command: Parser) -> None:
    """Add the arguments of `cotune records score`."""
    command.add_argument("run", metavar="RUN", help=RECORDS)
    command.add_argument("workflow", help=APP)
    command.add_argument("--role", help="calls of this role only, and no episodes")
    text = "a redactor of feedback, in addition to the redactors of the workflow and the run"
    add_fields(command, "redact", redact=text)
    command.add_argument(
        "--write", action="store_true", help="store the rewards: each replaces the reward of its name, others stay"
    )
    add_trust_folder(command, "RUN")


def run(a: argparse.Namespace) -> int:
    """Score recorded candidates and episodes again with the workflow's present scorers, and compare with the old
    rewards.

    Nothing is stored without --write. Groups that were trained on keep their rewards, so that figures of training stay
    true.
    """
    flow = load_workflow(a.workflow)
    if not flow.scorers and flow.episode_judge is None:
        remedy = f"Add @{flow.variable}.scorer(role) or @{flow.variable}.judge."
        raise ConfigError("workflow", a.workflow, "has no scorer and no judge", remedy)
    if a.role is not None and a.role not in flow.scorers:
        roles = ", ".join(sorted(flow.scorers)) or "none"
        raise ConfigError("--role", a.role, f"has no scorer; roles with one: {roles}")
    if a.write and is_path(a.run) and not Path(a.run).exists():
        raise ConfigError("run", a.run, "does not exist", "Name a run folder or records file.")
    folder = folder_of(a.run)
    flow = flow.redacted(redactor_of(folder)).redacted(a.redact)
    current_run.set(RunContext(folder=folder))
    with open_store(a.run, read_only=not a.write) as store:
        rescored = run_sync(rescore(flow, store, role=a.role, write=a.write))
        store.flush()
        refused = store.health.refused
        lost = store.health.lost
    terminal().print(_rewards_table(rescored))
    if refused:
        tell(f"{plural(refused, 'reward')} of groups that were trained on stay as they were")
    if lost:
        tell(f"{plural(lost, 'record')} could not be stored")
    if not a.write:
        tell("nothing was stored: --write stores the rewards")
    scored = sum(counts.candidates for counts in rescored.roles.values())
    return 0 if scored and not lost else 1


def _rewards_table(rescored: Rescoring) -> Group:
    """A table with a row for each role: its candidates and rewards before and now, and in how many groups another
    candidate is the best. Below it, the most common errors and roles without a scorer.
    """
    from rich.console import Group
    from rich.text import Text

    table = grid("role", "groups>", "scored>", "failed>", "another is best>", "before", "now")
    for role, counts in sorted(rescored.roles.items()):
        numbers = map(str, (counts.groups, counts.candidates, counts.failed, counts.others_best))
        before = _means(counts.sums_before, counts.counts_before)
        after = _means(counts.sums_after, counts.counts_after)
        table.add_row(role, *numbers, before, after)
    lines = [f"{count} x {text}" for text, count in rescored.errors.most_common(5)]
    if rescored.without_scorer:
        calls_by_role = sorted(rescored.without_scorer.items())
        roles = ", ".join(f"{role} ({plural(count, 'call')})" for role, count in calls_by_role)
        lines.append(f"no scorer: {roles}")
    return Group(table, *map(Text, lines))


def _means(sums: Mapping[str, float], counts: Mapping[str, int]) -> str:
    """The mean of each component, as `team 0.500`."""
    return ", ".join(f"{name} {sums[name] / counts[name]:.3f}" for name in sorted(counts)) or "-"
