"""The commands on rewards of what was recorded: `cotune judge` and `cotune score`."""

from __future__ import annotations

import argparse
from typing import Any

from cotune.cli.command import APP, RECORDS, add_command
from cotune.errors import ConfigError
from cotune.terminal import tell, terminal


def add_judge(commands: Any) -> None:
    """Add `cotune judge`."""

    def run(a: argparse.Namespace) -> int:
        from cotune.trainer.evaluation.judge_agreement import judge_agreement, render
        from cotune.trainer.evaluation.labels import write_blanks

        if (a.labels is None) == (a.to_label is None):
            raise ConfigError("labels", a.labels, "must be given where --to-label is not", "See cotune judge --help.")
        if a.to_label:
            try:
                lines = write_blanks(a.run_folder, a.to_label, groups=a.groups, role=a.role)
            except FileExistsError:
                raise ConfigError("to_label", a.to_label, "must be a new file", "Name another one.") from None
            tell(
                f"wrote {lines} candidates to {a.to_label}; fill in `score`, then: cotune judge {a.run_folder} --labels"
            )
            return 0 if lines else 1
        terminal().print(render(judge_agreement(a.run_folder, a.labels, a.app)))
        return 0

    text = "compare a judge, or any scorer, with a few labels of people, before anything is trained on it"
    command = add_command(commands, "judge", run, text, "cotune judge runs/r1 --labels labels.jsonl", extra="train")
    command.add_argument("run_folder", metavar="RUN", help=RECORDS)
    command.add_argument(
        "--labels",
        metavar="FILE",
        help='JSON lines such as {"id": "<call id>.<candidate>", "score": 3}, or with the id of an episode; a higher '
        "score is better, null is no label",
    )
    command.add_argument("--app", help=f"{APP}; default: the one that the run trained")
    command.add_argument("--to-label", metavar="FILE", help="write candidates to FILE for people to label, instead")
    command.add_argument(
        "--groups", type=int, default=20, help="calls whose candidates are written (default: %(default)s)"
    )
    command.add_argument("--role", help="write candidates of this role only")


def add_score(commands: Any) -> None:
    """Add `cotune score`."""

    def run(a: argparse.Namespace) -> int:
        from cotune.cli.score import score_run

        return score_run(a.run_folder, a.workflow, role=a.role, phase=a.phase, write=a.write)

    text = "score what was recorded with the scorers and the judge of today; runs nothing else"
    command = add_command(commands, "score", run, text, "cotune score runs/traced app:solve --write")
    command.add_argument("run_folder", metavar="RUN", help=RECORDS)
    command.add_argument("workflow", help=APP)
    command.add_argument("--role", help="calls of this role only, and no episodes")
    command.add_argument("--phase", help="episodes of this phase only: train, eval, trace, ...")
    command.add_argument(
        "--write", action="store_true", help="store the rewards: each replaces the one of its name, others stay"
    )
