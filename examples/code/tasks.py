"""Problems with hidden tests, a right program, and wrong ones: of our own, or of the public data sets.

python -m examples.code.tasks --tasks 512 --seed 0 > tasks.jsonl
python -m examples.code.tasks --apps train.jsonl --tasks 2000 > tasks.jsonl
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import string
import sys
from collections.abc import Iterable, Iterator, Sequence

from examples.code.datasets import LOADERS, DatasetError, add_files
from examples.code.families import FAMILIES, Family
from examples.code.programs import Test, sandbox
from examples.code.verifier import Problem
from examples.sandbox.permission import SandboxUnavailable

HIDDEN = 5
"""Hidden tests of a problem of our own; one more is the example in its question."""
SLICE = 150
"""Programs of ours that run in one process: few enough for the limits of one."""
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


def make_tasks(count: int, seed: int = 0) -> list[Problem]:
    """`count` problems of all families in turn, the same for the same seed; other seeds give held-out problems."""
    rng = random.Random(f"code {seed}")
    drawn = [_draw(family, rng) for family in itertools.islice(itertools.cycle(FAMILIES), count)]
    wanted = [(program, inputs) for _, programs, inputs in drawn for program in programs]
    said = [outputs for start in range(0, len(wanted), SLICE) for outputs in _answers(wanted[start : start + SLICE])]
    answers, tasks = iter(said), list[Problem]()
    for number, (question, programs, inputs) in enumerate(drawn):
        right, *wrong = (next(answers) for _ in programs)
        example, *tests = (Test(input=given, output=out) for given, out in zip(inputs, right, strict=True))
        tasks.append(
            {
                "id": f"{FAMILIES[number % len(FAMILIES)].name}-{seed}-{number}",
                "question": f"{question}\n\nInput:\n{example['input']}\nOutput:\n{example['output']}",
                "examples": [example],
                "tests": tests,
                "function": "",
                "reference": programs[0],
                "wrong": [p for p, outs in zip(programs[1:], wrong, strict=True) if outs[1:] != right[1:]],
            }
        )
    return tasks


def _draw(family: Family, rng: random.Random) -> tuple[str, list[str], list[str]]:
    """A question, its right and its wrong programs, and different inputs."""
    a, inputs = rng.choice(family.values), dict[str, None]()
    while len(inputs) <= HIDDEN:
        inputs[family.draw(rng, a)] = None
    filled = [string.Template(text).substitute(a=a) for text in (family.question, family.right, *family.wrong)]
    return filled[0], filled[1:], list(inputs)


def _answers(wanted: Sequence[tuple[str, list[str]]]) -> list[list[str]]:
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
    """Print problems, one line of JSON each; of what is left out, or lacks a right program, the count."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tasks", type=int, default=512, help="at most (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    add_files(parser, LOADERS)
    parser.add_argument("--tests", type=int, default=16, help="most hidden tests of a problem (default: %(default)s)")
    options = parser.parse_args()
    try:
        public = any(getattr(options, name) for name in LOADERS)
        _print(_loaded(options) if public else make_tasks(options.tasks, options.seed), options.tasks)
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
