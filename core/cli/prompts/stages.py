"""`cotune train --strategy`: searches for prompts and trainings of weights in turn."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cotune.cli.command import add_fields, add_repeated, prices
from cotune.cli.prompts.agreement import add_yes, agreed
from cotune.cli.prompts.improve import ASKING
from cotune.errors import ConfigError
from cotune.storage.run_layout import read_run_json
from cotune.terminal import tell, terminal

if TYPE_CHECKING:
    from cotune.trainer.config.train import TrainConfig
    from cotune.trainer.prompting.strategy import StrategyReport

_TABLE = "prompts."


def stage_arguments(group: Any) -> None:
    """Add the flags of a strategy."""
    from cotune.trainer.prompting.options import ImproveOptions

    add_fields(group, "strategy")
    add_fields(group, *ASKING, table=ImproveOptions)
    text = "price of a million prompt and completion tokens of the reflection model"
    add_repeated(group, "--price", "MODEL=PROMPT/COMPLETION", text)
    add_yes(group)


def take_search(a: argparse.Namespace, fields: dict[str, Any]) -> dict[str, Any]:
    """The options of searches among `fields`, which are taken out of them: flags, and `--set prompts.NAME`."""
    found = {name: fields.pop(name) for name in ASKING if name in fields}
    for name in [name for name in fields if name.startswith(_TABLE)]:
        found[name.removeprefix(_TABLE)] = fields.pop(name)
    return found | ({"prices": prices(a.price)} if a.price else {})


def run_stages(a: argparse.Namespace, config: TrainConfig, given: dict[str, Any]) -> int:
    """Run the stages of a strategy; the exit status."""
    from cotune.trainer.prompting.options import LIMITS, load_options, named_options
    from cotune.trainer.prompting.strategy import check_strategy, run_strategy

    if a.tasks is None:
        raise ConfigError("tasks", None, "is missing", "Pass --tasks FILE.")
    search = load_options(a.config, {"prices": config.prices, **given})
    check_strategy(a.workflow, a.tasks, config, search)
    limited = "p" not in config.strategy or not LIMITS.isdisjoint(named_options(a.config, given))
    if not agreed(search, yes=a.yes, limited=limited, here=True):
        tell("nothing is asked")
        return 1
    out = a.out or Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    with _way_on(out):
        return _told(run_strategy(a.workflow, a.tasks, config, search, out=out))


def resume_stages(a: argparse.Namespace, changes: dict[str, Any], search: dict[str, Any]) -> int:
    """Go on with the stages of a folder; the exit status."""
    from cotune.trainer.config.train import read_toml
    from cotune.trainer.prompting.options import named_options
    from cotune.trainer.prompting.strategy import resume_strategy

    if a.out is not None:
        raise ConfigError("out", a.out, "cannot be used with --resume, which names the run", "Leave out --out.")
    told = {name: value for name, value in read_toml(a.config).items() if name != "prompts"}
    with _way_on(a.resume):
        report = resume_strategy(
            a.resume,
            workflow=a.workflow,
            tasks=a.tasks,
            changes={**told, **changes},
            search=named_options(a.config, search),
        )
    return _told(report)


@contextlib.contextmanager
def _way_on(out: str | Path) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        tell(f"what is done is kept; to go on: cotune train --resume {out}")
        raise


def _told(report: StrategyReport) -> int:
    from cotune.trainer.prompting.strategy import render

    if report.stages:
        terminal().print(render(report))
    if not report.finished:
        tell(f"stopped; to go on: cotune train --resume {report.path}")
        return 130
    if report.stages and report.stages[-1].limited:
        tell(f"the search ended at a limit; to go on: cotune train --resume {report.path}, with a higher one")
    kept = {"prompts": report.prompts, "weights": report.run}
    tell("; ".join(f"{name}: {folder or 'as they were'}" for name, folder in kept.items()))
    prompts = f" --prompts {report.path}" if report.prompts else ""
    if report.run:
        app = read_run_json(report.run)["workflow"] or "WORKFLOW"
        tell(f"next: cotune export {report.path} --out adapters/")
        tell(f"to look at it: cotune eval {app} --run {report.run}{prompts} --tasks FRESH.jsonl")
    elif report.prompts:
        tell(f"next: cotune prompts diff {report.path}")
    return 0
