"""Problems with right answers: of reasoning-gym's generators, or of the public data sets.

python -m examples.workloads.maths.tasks --tasks 512 --seed 0 > tasks.jsonl
python -m examples.workloads.maths.tasks --download polaris aime24 aime25 --tasks 8000
python -m examples.workloads.maths.tasks --gsm8k train.parquet --tasks 8000 > tasks.jsonl
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from examples.word_problems import tasks as word_problems
from examples.workloads.data_files import DatasetError, add_files
from examples.workloads.downloads import add_download, download_tasks
from examples.workloads.maths.answers import number, plain
from examples.workloads.maths.datasets import LOADERS
from examples.workloads.maths.verifier import Problem

KINDS: dict[str, dict[str, Any]] = {
    "gsm_symbolic": {},
    "basic_arithmetic": {"operators": ("+", "-", "*")},
    "simple_equations": {},
    "leg_counting": {},
    "decimal_chain_sum": {},
    "fraction_simplification": {"styles": ("plain",)},
    "gcd": {},
    "lcm": {},
}
"""Generators and their settings; tasks take turns between them."""
SUMS: dict[str, dict[str, Any]] = {"chain_sum": {"min_terms": 3, "max_terms": 3, "min_digits": 2, "max_digits": 2}}
"""For a model of 0.3M parameters: three numbers of two digits, with + and - between them."""
SETS = ("polaris", "aime24", "aime25", "olympiadbench")
"""Public data sets of this workload that can be downloaded."""
APART = 10**6
"""A generator's problem is drawn by its seed plus its number: neighbouring seeds would share nearly all problems."""


def make_tasks(count: int, seed: int = 0, *, kinds: Mapping[str, dict[str, Any]] = KINDS) -> list[Problem]:
    """`count` problems of all kinds in turn, the same for the same seed; other seeds give held-out ones."""
    start = seed * APART
    return [
        {**task, "answer": plain(task["answer"]) or "", "tolerance": "0"}
        for task in word_problems.make_tasks(count, seed=start, kinds=kinds)
    ]


def _loaded(options: argparse.Namespace) -> Iterator[Problem | None]:
    for name, loader in LOADERS.items():
        for file in getattr(options, name):
            yield from loader(file)


def main() -> None:
    """Print problems, one line of JSON each, or download public data sets and write a file for each split.

    Prints how many rows are left out, and how many answers are expressions."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tasks", type=int, default=512, help="at most (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sums", action="store_true", help="sums of three numbers alone, for a small model")
    add_files(parser, LOADERS)
    add_download(parser, SETS, "maths")
    options = parser.parse_args()
    public = any(getattr(options, name) for name in LOADERS)
    try:
        if options.download is not None:
            download_tasks(options, options.download or SETS, LOADERS)
            return
        generated = functools.partial(make_tasks, options.tasks, options.seed, kinds=SUMS if options.sums else KINDS)
        _print(_loaded(options) if public else generated(), options.tasks)
    except DatasetError as error:
        raise SystemExit(str(error)) from None


def _print(rows: Iterable[Problem | None], most: int) -> None:
    printed = expressions = left_out = 0
    for task in rows:
        if task is None:
            left_out += 1
            continue
        print(json.dumps(task))
        printed += 1
        expressions += number(task["answer"], worked_out=False) is None
        if printed == most:
            break
    print(
        f"{printed} problems, {expressions} of them with an expression as the answer; "
        f"{left_out} rows without one answer are left out",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
