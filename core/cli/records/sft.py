"""`cotune records sft`."""

from __future__ import annotations

import argparse

from cotune.cli.command import RECORDS, Parser, tell_left_out
from cotune.tables import plural
from cotune.terminal import tell

TEXT = "Write recorded answers as chat lines for supervised fine-tuning"
EXAMPLE = "cotune records sft runs/r1 --out sft.jsonl --role writer --min-reward 1"


def arguments(command: Parser) -> None:
    """Add the arguments of `cotune records sft`."""
    command.add_argument("run", metavar="RUN", help=RECORDS)
    command.add_argument("--out", required=True, metavar="FILE", help="JSON-lines file to write")
    command.add_argument("--role", help="calls of this role only")
    command.add_argument(
        "--min-reward", type=float, metavar="X", help="minimum sum of the answer's rewards, or else of the episode's"
    )
    command.add_argument(
        "--messages",
        choices=("sent", "asked"),
        default="sent",
        help="if prompts were edited: write the messages that were sent to the model, or the application's own "
        "(asked). Answers to better prompts, written below the application's own, teach a model to do without them "
        "(default: %(default)s)",
    )


def run(a: argparse.Namespace) -> int:
    """Write recorded answers as a data set for supervised fine-tuning. Exit status: 1 if no answer could be used."""
    from cotune.reading.sft_export import write_supervised
    from cotune.storage.open_store import open_store

    with open_store(a.run, read_only=True) as store:
        written = write_supervised(store, a.out, role=a.role, min_reward=a.min_reward, asked=a.messages == "asked")
    tell(f"wrote {plural(written.lines, 'line')} to {a.out}")
    tell_left_out(written.left_out)
    return 0 if written.lines else 1
