"""`cotune records judge`."""

from __future__ import annotations

import argparse

from cotune.cli.command import APP, RECORDS, Parser, add_trust_folder, tell_left_out
from cotune.cli.records.judge_agreement import judge_agreement
from cotune.errors import ConfigError
from cotune.judging.labels import CALLS, write_blanks
from cotune.tables import plural
from cotune.terminal import tell

TEXT = "Measure how often a judge, or any scorer, agrees with people's preferences"
EXAMPLE = "cotune records judge runs/r1 --labels labels.jsonl"


def arguments(command: Parser) -> None:
    """Add the arguments of `cotune records judge`."""
    text = f"{RECORDS}; with --labels, loads the scorers of the application that it names, or of --app"
    command.add_argument("run", metavar="RUN", help=text)
    command.add_argument(
        "--labels",
        metavar="FILE",
        help='JSON lines such as {"id": "<call id>.<candidate>", "score": 3}, or with the id of an episode; a higher '
        "score is better, null is no label",
    )
    command.add_argument("--app", help=f"{APP}; default: the application that the run trained")
    command.add_argument(
        "--to-label",
        metavar="FILE",
        help=f"write the candidates of {CALLS} calls to FILE for people to label, instead",
    )
    command.add_argument("--role", help="write candidates of this role only")
    add_trust_folder(command, "RUN")


def run(a: argparse.Namespace) -> int:
    """Compare the application's scorers with people's labels, or with --to-label write the file for people to
    fill in.
    """
    if (a.labels is None) == (a.to_label is None):
        fault = "is missing" if a.labels is None else "cannot be used with --to-label"
        raise ConfigError("--labels", a.labels, fault, "Pass one of --labels and --to-label.")
    if a.labels:
        agreement = judge_agreement(a.run, a.labels, a.app)
        in_groups = f"{plural(agreement.pairs, 'pair')} in {plural(agreement.groups, 'group')}"
        tell(f"agreement with people: {agreement.share:.1%} of {in_groups} (chance: 50%)")
        tell_left_out(agreement.left_out)
        return 0
    try:
        lines = write_blanks(a.run, a.to_label, role=a.role)
    except FileExistsError:
        raise ConfigError("--to-label", a.to_label, "exists already", "Name a new file.") from None
    tell(f"wrote {plural(lines, 'candidate')} to {a.to_label}: fill in `score` of each")
    return 0 if lines else 1
