"""`cotune replay`: run recorded episodes again."""

from __future__ import annotations

import argparse
from typing import Any

from cotune.cli.command import APP, RECORDS, add_command, add_trust
from cotune.cli.fields import add_fields, given
from cotune.terminal import tell, terminal

_FIELDS = (
    "episode", "all", "call", "k", "answer", "workflow", "model", "limit", "temperature", "max_tokens", "concurrency",
    "timeout", "out",
)  # fmt: skip


def add_replay(commands: Any) -> None:
    """Add `cotune replay`."""

    def run(a: argparse.Namespace) -> int:
        from cotune.trainer.replay.replay import ReplayOptions, replay
        from cotune.trainer.replay.report import render
        from cotune.trainer.reporting.progress import episode_bar

        options = ReplayOptions(**{name: getattr(a, name) for name in _FIELDS}, **given(a))
        tell(f"reading {a.run_folder} ...")
        report = replay(a.run_folder, options, lambda total: episode_bar(terminal(), total))
        terminal().print(render(report))
        if report.interrupted:
            return 130
        return 1 if report.diverged or report.failed else 0

    text = "run recorded episodes again: one from a call on, or all as a regression test of the application"
    example = (
        "cotune replay runs/r1 --episode 01K0ABC --call 2 -k 4\n"
        "  cotune replay runs/r1 --episode 01K0ABC --call 2 --answer 'go left'\n"
        "  cotune replay runs/traced --workflow app:solve --all                  does it still ask what it asked?\n"
        "  cotune replay runs/traced --workflow app:solve --all --model base/    the same tasks with another model"
    )
    command = add_command(commands, "replay", run, text, example, extra="train")
    add_trust(command)
    command.add_argument("run_folder", metavar="RUN", help=RECORDS)
    command.add_argument("--episode", metavar="ID", help="the episode to run again; cotune show RUN lists them")
    command.add_argument(
        "--all",
        action="store_true",
        help="every recorded episode; the exit status is 1 where one diverges or newly fails",
    )
    command.add_argument(
        "--call",
        type=int,
        metavar="N",
        help="the call from which on it is new, by its number in cotune show --episode; calls before it are answered "
        "from the record. Without it all are, or with --model none",
    )
    command.add_argument(
        "-k", type=int, default=1, metavar="K", help="run it so often, each time with other random numbers"
    )
    command.add_argument(
        "--answer", metavar="TEXT", help="what is said at the call: a text, or an assistant message as JSON"
    )
    command.add_argument("--workflow", help=f"{APP}; without it the run's own")
    command.add_argument(
        "--model",
        metavar="MODEL",
        help="what answers new calls: a run, an export, or a model (untrained, for all roles); without it the newest "
        "checkpoint of RUN, or where there is none the application's own provider, which is asked and paid as ever",
    )
    command.add_argument(
        "--temperature", type=float, metavar="T", help="of new calls; without it what the application asks"
    )
    command.add_argument(
        "--max-tokens",
        type=int,
        default=256,
        metavar="N",
        help="where the application names no limit (default: %(default)s)",
    )
    command.add_argument("--limit", type=int, metavar="N", help="with --all, only the first N episodes")
    command.add_argument("--concurrency", type=int, default=8, help="episodes in flight (default: %(default)s)")
    command.add_argument("--timeout", type=float, default=600.0, help="seconds for one episode (default: %(default)s)")
    command.add_argument("--out", metavar="DIR", help="also write the records to this new folder")
    add_fields(command, "roles_by")
