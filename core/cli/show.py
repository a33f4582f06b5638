"""`cotune show`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cotune.cli.command import Parser, add_repeated, parse_prices
from cotune.cli.servers.view import PRICE, RUNS
from cotune.errors import ConfigError
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.open_store import is_path
from cotune.terminal import tell, terminal

if TYPE_CHECKING:
    from cotune.reading.run import OpenedRun

EXAMPLE = "cotune show runs/r1 --groups"
EXTRA = "view"
EXTRA_FOR = "--html"
_FILTERS = ("task", "role", "status", "min_reward", "max_reward")


def arguments(command: Parser) -> None:
    """Add the arguments of `cotune show`."""
    command.add_argument("run", nargs="?", default="runs", metavar="RUN", help=f"{RUNS}, whose runs are listed")
    view = command.add_mutually_exclusive_group()
    view.add_argument("--episode", metavar="ID", help="one episode as a tree of calls")
    view.add_argument("--steps", action="store_true", help="curves by role and policy, and a line for each step")
    view.add_argument("--groups", action="store_true", help="groups by role and turn; samples left out, with reasons")
    view.add_argument("--html", type=Path, metavar="FILE", help="write one HTML page of the run, to send to somebody")
    view.add_argument("--by", metavar="SETTING", help="for a folder of runs: a table by this setting, over their seeds")
    command.add_argument("--explain", action="store_true", help="with --steps: explain each curve and column")
    command.add_argument("--full", action="store_true", help="with --episode: whole prompts and answers")
    command.add_argument("--task", metavar="ID", help="episodes of one task only")
    command.add_argument("--role", help="episodes with a call of this role")
    command.add_argument("--status", choices=("ok", "error", "cancelled"), help="episodes with this status")
    command.add_argument("--min-reward", type=float, metavar="X", help="minimum sum of an episode's rewards")
    command.add_argument("--max-reward", type=float, metavar="X", help="maximum sum of an episode's rewards")
    command.add_argument(
        "--limit", type=int, default=20, metavar="N", help="episodes or steps listed (default: %(default)s)"
    )
    command.add_argument("--json", action="store_true", help="the episodes, the episode or the steps as lines of JSON")
    add_repeated(command, "--price", "MODEL=PROMPT/COMPLETION", f"with --html: {PRICE}")


def run(a: argparse.Namespace) -> int:
    """Show runs: a list of a folder's runs, one run, its steps or groups, or one episode; as text, JSON or a page."""
    from cotune.reading.find_runs import holds_records

    if is_path(a.run) and not holds_records(Path(a.run)):
        return _list(a)
    filters = EpisodeFilters(
        task=a.task or "", role=a.role or "", status=a.status or "", low=a.min_reward, high=a.max_reward
    )
    if a.by:
        remedy = "Name the folder that has the runs: cotune show runs --by recipe"
        raise ConfigError("--by", a.by, f"needs a folder of runs, and {a.run} is one run", remedy)
    if a.explain and not a.steps:
        remedy = "For example: cotune show RUN --steps --explain"
        raise ConfigError("--explain", None, "has no effect without --steps", remedy)
    if a.price and not a.html:
        remedy = "For example: cotune show RUN --html FILE --price gpt-4o-mini=0.15/0.60"
        raise ConfigError("--price", None, "has no effect without --html", remedy)
    if a.html:
        _write_page(a)
    elif a.json:
        _print_json(a, filters)
    elif a.steps:
        from cotune.cli.printing.steps import show_steps

        terminal().print(show_steps(a.run, a.limit, explain=a.explain))
    else:
        from cotune.cli.printing.overview import show_run

        shown = show_run(a.run, episode=a.episode, groups=a.groups, filters=filters, full=a.full, limit=a.limit)
        terminal().print(shown)
    return 0


def _list(a: argparse.Namespace) -> int:
    """List the runs of a folder, or group them by a setting. Raises RunError if the folder has no runs."""
    from cotune.cli.printing.runs import list_runs
    from cotune.reading.find_runs import open_runs

    runs = open_runs([a.run])
    if a.by:
        return _group_runs(a, runs)
    views = ("episode", "steps", "groups", "html", "explain", "full", "json", "price")
    if flag := _first_flag(a, (*views, *_FILTERS)):
        remedy = f"For example: cotune show {runs[-1].path} {flag} ..."
        raise ConfigError(flag, None, f"needs one run, and {a.run} is a folder of {len(runs)}", remedy)
    a.result = str(runs[-1].path)
    terminal().print(list_runs(runs), crop=False)
    return 0


def _group_runs(a: argparse.Namespace, runs: Sequence[OpenedRun]) -> int:
    """Print runs by a setting, as a table or as one line of JSON. Closes the runs."""
    from cotune.cli.printing.by_setting import show_by_setting
    from cotune.reading.by_setting import by_setting

    if flag := _first_flag(a, ("explain", "full", "price", *_FILTERS)):
        raise ConfigError(flag, None, "cannot be used with --by", "The table has a row for each value of the setting.")
    try:
        grouped = by_setting(runs, a.by)
    finally:
        for run in runs:
            run.close()
    if a.json:
        print(msgspec.json.encode(grouped).decode())
    else:
        terminal().print(show_by_setting(grouped))
    return 0


def _write_page(a: argparse.Namespace) -> None:
    """Write one HTML page of the run. Raises ConfigError for a flag that has no effect on it."""
    from cotune.integrations.web.viewer.report import write_report

    if flag := _first_flag(a, ("explain", "full", "json", *_FILTERS)):
        raise ConfigError(flag, None, "cannot be used with --html", "The page shows the whole run.")
    write_report(a.run, a.html, parse_prices(a.price))
    tell(f"wrote {a.html}, {a.html.stat().st_size / 1024:,.0f} KB: it opens in any browser, without a network")


def _first_flag(a: argparse.Namespace, names: tuple[str, ...]) -> str:
    """The first of these flags on the command line, or an empty text."""
    for name in names:
        value = getattr(a, name)
        if value is not None and value is not False and value != []:
            return f"--{name.replace('_', '-')}"
    return ""


def _print_json(a: argparse.Namespace, filters: EpisodeFilters) -> None:
    """Print the steps of a run, one episode, or the latest episodes as lines of JSON."""
    from cotune.cli.printing.as_json import episode_as_json, episodes_as_json, line
    from cotune.storage.metrics_file import read_metrics
    from cotune.storage.open_store import open_store

    if a.groups:
        raise ConfigError("--json", None, "cannot be used with --groups", "Use it alone, with --episode or --steps.")
    if a.steps:
        for metrics in read_metrics(a.run)[-a.limit :]:
            print(line(metrics))
        return
    with open_store(a.run, read_only=True) as store:
        if a.episode:
            print(episode_as_json(store, a.episode))
            return
        for text in episodes_as_json(store, filters, a.limit):
            print(text)
