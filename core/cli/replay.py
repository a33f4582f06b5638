"""`cotune replay`: run recorded episodes again."""

from __future__ import annotations

import argparse
from typing import Any

from cotune.cli.command import RECORDS, add_command, add_trust
from cotune.cli.fields import add_fields, given
from cotune.terminal import tell, terminal


def add_replay(commands: Any) -> None:
    """Add `cotune replay`."""
    from cotune.trainer.replay.options import ReplayOptions

    def run(a: argparse.Namespace) -> int:
        from cotune.trainer.replay.replay import replay
        from cotune.trainer.replay.report import render
        from cotune.trainer.reporting.progress import episode_bar

        options = ReplayOptions(**given(a))
        tell(f"reading {a.run_folder} ...")
        report = replay(a.run_folder, options, lambda total: episode_bar(terminal(stderr=True), total))
        terminal().print(render(report))
        if report.interrupted:
            return 130
        return 1 if report.diverged or report.failed else 0

    text = "run recorded episodes again: one from a call on, or all as a regression test of the application"
    example = (
        "cotune replay runs/r1 --episode 01K0ABC --call 2 -k 4\n"
        "  cotune replay runs/r1 --episode 01K0ABC --call 2 --answer 'go left'\n"
        "  cotune replay runs/traced --workflow app:solve --all                  # does it still ask what it asked?\n"
        "  cotune replay runs/traced --workflow app:solve --all --model base/    # the same tasks with another model"
    )
    command = add_command(commands, "replay", run, text, example, extra="train")
    add_trust(command)
    command.add_argument("run_folder", metavar="RUN", help=RECORDS)
    add_fields(command, *ReplayOptions.__struct_fields__, table=ReplayOptions)
