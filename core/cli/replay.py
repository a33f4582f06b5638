"""`cotune replay`."""

from __future__ import annotations

import argparse

from cotune.cli.command import RECORDS, Parser, add_fields, add_trust_folder, fields_of
from cotune.terminal import tell, terminal

EXAMPLE = (
    "cotune replay runs/r1 --episode 01K0ABC --call 2 -k 4\n"
    "  cotune replay runs/r1 --episode 01K0ABC --call 2 --answer 'go left'\n"
    "  cotune replay runs/traced --all                # same requests?\n"
    "  cotune replay runs/traced --all --model base/  # with another model"
)
EXTRA = "train"


def arguments(command: Parser) -> None:
    from cotune.trainer.replay.options import ReplayOptions

    text = f"{RECORDS}; runs the application that it names, or that of --workflow"
    command.add_argument("run", metavar="RUN", help=text)
    add_fields(command, *ReplayOptions.__struct_fields__, table=ReplayOptions)
    add_trust_folder(command, "RUN")


def run(a: argparse.Namespace) -> int:
    """Repeat recorded episodes with their recorded answers, and report where the application now behaves differently.

    Exit status: 130 if interrupted, 1 if an episode diverged or failed.
    """
    from cotune.storage.open_store import without_password
    from cotune.trainer.replay.options import ReplayOptions
    from cotune.trainer.replay.replay import replay
    from cotune.trainer.replay.report import render
    from cotune.trainer.reporting.progress import episode_bar

    options = ReplayOptions(**fields_of(a))
    tell(f"reading {without_password(a.run)} ...")
    report = replay(a.run, options, lambda total: episode_bar(terminal(stderr=True), total))
    terminal().print(render(report))
    a.result = report
    if report.interrupted:
        return 130
    return 1 if report.diverged or report.failed else 0
