"""`cotune judge`."""

from __future__ import annotations

import argparse

from cotune.cli.command import APP, RECORDS, Parser
from cotune.errors import ConfigError
from cotune.tables import plural
from cotune.terminal import tell, terminal

EXAMPLE = "cotune judge runs/r1 --labels labels.jsonl"
EXTRA = "train"


def arguments(command: Parser) -> None:
    text = f"{RECORDS}; with --labels, loads the scorers of the application that it names, or of --app"
    command.add_argument("run", metavar="RUN", help=text)
    command.add_argument(
        "--labels",
        metavar="FILE",
        help='JSON lines such as {"id": "<call id>.<candidate>", "score": 3}, or with the id of an episode; a higher '
        "score is better, null is no label",
    )
    command.add_argument("--app", help=f"{APP}; default: the one that the run trained")
    command.add_argument("--to-label", metavar="FILE", help="write candidates to FILE for people to label, instead")
    command.add_argument(
        "--groups",
        type=int,
        default=20,
        metavar="N",
        help="calls whose candidates are written (default: %(default)s)",
    )
    command.add_argument("--role", help="write candidates of this role only")


def run(a: argparse.Namespace) -> int:
    from cotune.trainer.evaluation.judge_agreement import judge_agreement, render
    from cotune.trainer.evaluation.labels import write_blanks

    if (a.labels is None) == (a.to_label is None):
        fault = "is missing" if a.labels is None else "cannot be used with --to-label"
        raise ConfigError("--labels", a.labels, fault, "Pass one of --labels and --to-label.")
    if a.labels:
        terminal().print(render(judge_agreement(a.run, a.labels, a.app)))
        return 0
    try:
        lines = write_blanks(a.run, a.to_label, groups=a.groups, role=a.role)
    except FileExistsError:
        raise ConfigError("--to-label", a.to_label, "exists already", "Name a new file.") from None
    tell(f"wrote {plural(lines, 'candidate')} to {a.to_label}: fill in `score` of each")
    return 0 if lines else 1
