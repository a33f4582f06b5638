"""Problems with hidden tests, a right program, and wrong ones: of our own, or of the public data sets.

python -m examples.workloads.code.tasks --tasks 512 --seed 0 > tasks.jsonl
python -m examples.workloads.code.tasks --download apps --tasks 2000
python -m examples.workloads.code.tasks --apps train.jsonl --tasks 2000 > tasks.jsonl
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import random
import string
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from examples.workloads.code.datasets import LOADERS
from examples.workloads.code.families import FAMILIES, SMALL_FAMILIES, Family
from examples.workloads.code.programs import Test, sandbox
from examples.workloads.code.verifier import Problem
from examples.workloads.data_files import DatasetError, add_files
from examples.workloads.downloads import Reader, add_download, download_tasks
from examples.workloads.sandbox.permission import SandboxUnavailable

HIDDEN = 5
"""Hidden tests of a problem of our own; one more is the example in its question."""
SLICE = 150
"""Programs of ours that run in one process: few enough for the limits of one."""
SETS = ("apps", "codecontests", "livecodebench")
"""Public data sets of this workload."""
SMALL: Mapping[str, Any] = {"families": SMALL_FAMILIES, "problems": 32}
"""What `make_tasks` takes for tasks that a model of 0.3M parameters can learn."""
BATCH = """
import contextlib, io, json, sys
def answers(program, inputs):
    said = []
    for given in inputs:
        sys.stdin = io.StringIO(given)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(program, "program", "exec"), {})
        said.append(out.getvalue())
    return said
print(json.dumps([answers(*one) for one in json.loads(sys.stdin.read())]))
"""
"""Many of our own programs in one process, which is much faster: each with its inputs."""


def make_tasks(
    count: int, seed: int = 0, *, families: Sequence[Family] = FAMILIES, problems: int | None = None
) -> list[Problem]:
    """`count` problems of all families in turn, the same for the same seed; other seeds give held-out problems.

    Of `problems` there are at most so many different ones, which come again and again, as those of a data set do.
    """
    rng = random.Random(f"code {seed}")
    different = count if problems is None else min(count, problems)
    drawn = [_draw(family, rng) for family in itertools.islice(itertools.cycle(families), different)]
    answers = iter(written([(program, inputs) for _, programs, inputs in drawn for program in programs]))
    made = list[Problem]()
    for family, (question, programs, inputs) in zip(itertools.cycle(families), drawn, strict=False):
        right, *wrong = (next(answers) for _ in programs)
        example, *tests = (Test(input=given, output=out) for given, out in zip(inputs, right, strict=True))
        made.append(
            {
                "id": f"{family.name}-{seed}",
                "question": f"{question}\n\nInput:\n{example['input']}\nOutput:\n{example['output']}",
                "examples": [example],
                "tests": tests,
                "function": "",
                "reference": programs[0],
                "wrong": [p for p, outs in zip(programs[1:], wrong, strict=True) if outs[1:] != right[1:]],
            }
        )
    tasks = zip(range(count), itertools.cycle(made), strict=False)
    return [{**task, "id": f"{task['id']}-{number}"} for number, task in tasks]


def _draw(family: Family, rng: random.Random) -> tuple[str, list[str], list[str]]:
    """A question, its right and its wrong programs, and different inputs."""
    a, inputs = rng.choice(family.values), dict[str, None]()
    while len(inputs) <= HIDDEN:
        inputs[family.draw(rng, a)] = None
    filled = [string.Template(text).substitute(a=a) for text in (family.question, family.right, *family.wrong)]
    return filled[0], filled[1:], list(inputs)


def written(wanted: Sequence[tuple[str, list[str]]], at_once: int = SLICE) -> list[list[str]]:
    """What programs of ours write, each on its inputs, `at_once` in one process. Raises RuntimeError if one fails."""
    return [outputs for at in range(0, len(wanted), at_once) for outputs in _written(wanted[at : at + at_once])]


def _written(wanted: Sequence[tuple[str, list[str]]]) -> list[list[str]]:
    ran = sandbox().run(BATCH, json.dumps(wanted))
    if not ran.ok or ran.cut:
        raise RuntimeError(f"the problems' own programs failed ({ran.ended}, code {ran.code}): {ran.stderr}")
    answers: list[list[str]] = json.loads(ran.stdout)
    return answers


def _loaded(options: argparse.Namespace) -> Iterator[Problem | None]:
    for name, loader in LOADERS.items():
        for file in getattr(options, name):
            yield from loader(file, options.tests)


def main() -> None:
    """Print problems, one line of JSON each, or download public data sets and write a file for each split.

    Prints how many rows are left out, and how many problems lack a right program."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tasks", type=int, default=512, help="at most (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="32 problems with small numbers, again and again")
    add_files(parser, LOADERS)
    parser.add_argument("--tests", type=int, default=16, help="most hidden tests of a problem (default: %(default)s)")
    add_download(parser, SETS, "code")
    options = parser.parse_args()
    try:
        if options.download is not None:
            readers: dict[str, Reader] = {
                name: functools.partial(loader, most=options.tests) for name, loader in LOADERS.items()
            }
            download_tasks(options, options.download or SETS, readers)
            return
        public = any(getattr(options, name) for name in LOADERS)
        generated = functools.partial(make_tasks, options.tasks, options.seed, **(SMALL if options.small else {}))
        _print(_loaded(options) if public else generated(), options.tasks)
    except (DatasetError, SandboxUnavailable) as error:
        raise SystemExit(str(error)) from None


def _print(rows: Iterable[Problem | None], most: int) -> None:
    printed = unjudged = left_out = 0
    for task in rows:
        if task is None:
            left_out += 1
            continue
        print(json.dumps(task))
        printed += 1
        unjudged += not (task["reference"] and task["wrong"])
        if printed == most:
            break
    print(
        f"{printed} problems, {unjudged} of them without a right and a wrong program, which teach the tester nothing; "
        f"{left_out} rows without tests are left out",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
