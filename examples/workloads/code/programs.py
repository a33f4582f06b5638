"""Programs and tests as the roles write them, and programs run on tests, in the sandbox."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Sequence
from typing import NotRequired, TypedDict

from examples.workloads.sandbox.bubblewrap import Limits, Ran, Sandbox

MAX_TESTS = 8
"""Tests of a message that count: the first so many."""
_PROGRAM = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_TEST = re.compile(
    r"\*\*Test Input:\*\*\s*```[^\n`]*\n(.*?)```\s*\*\*Test Output:\*\*\s*```[^\n`]*\n(.*?)```",
    re.DOTALL | re.IGNORECASE,
)
CALL = """
import json as _json, sys as _sys
_out, _sys.stdout = _sys.stdout, _sys.stderr
_arguments = _json.loads(_sys.stdin.read())
_call = Solution().{name} if "Solution" in globals() else {name}
_out.write(_json.dumps(_call(*_arguments)))
"""
"""What is added to a program that is a function: arguments come as a JSON list, the result goes out as JSON."""


class Test(TypedDict):
    """What a program reads and must write: text, or JSON where a function is asked for. `also` is right too."""

    input: str
    output: str
    also: NotRequired[str]


@functools.cache
def sandbox() -> Sandbox:
    """The sandbox of this process. Raises SandboxUnavailable, with the remedy, where the machine allows none."""
    return Sandbox(Limits(cpu_s=4, wall_s=30, memory_mb=512))


def program_in(message: str) -> str | None:
    """The last program that a message holds between ``` marks; None without one."""
    found = _PROGRAM.findall(message)
    return found[-1] if found and found[-1].strip() else None


def tests_in(message: str) -> list[Test]:
    """The tests that a message holds, each input once, at most `MAX_TESTS`."""
    made: dict[str, Test] = {}
    for given, expected in _TEST.findall(message):
        made.setdefault(given.strip(), {"input": given, "output": expected})
    return list(made.values())[:MAX_TESTS]


@functools.lru_cache(1 << 14)
def run(program: str, given: str = "", function: str = "") -> Ran:
    """Run a program on an input; where `function` is asked for, call it with the arguments that the input lists.

    What came of it is kept: the same right and wrong programs are run for all candidates of a tester, and a coder
    writes the same program again and again.
    """
    return sandbox().run(program + CALL.format(name=function) if function else program, given)


def matches(ran: Ran, test: Test, function: str = "") -> bool:
    """Whether a program came to its end and wrote what a test expects: the same lines but for spaces at their ends, or
    the same JSON."""
    if not ran.ok or ran.cut:
        return False
    accepted = (test["output"], test.get("also", test["output"]))
    if not function:
        return _lines(ran.stdout) in [_lines(text) for text in accepted]
    try:
        return json.loads(ran.stdout) in [json.loads(text) for text in accepted]
    except json.JSONDecodeError:
        return False


def passed(program: str | None, tests: Iterable[Test], function: str = "") -> list[bool]:
    """Which tests a program passes, each in a process of its own; None passes none, and one that runs into a limit of
    time passes none of the rest."""
    outcomes: list[bool] = []
    for test in tests:
        ran = None if program is None else run(program, test["input"], function)
        outcomes.append(ran is not None and matches(ran, test, function))
        program = program if ran is not None and ran.ended == "exit" else None
    return outcomes


def passes_all(program: str, tests: Iterable[Test], function: str = "") -> bool:
    """Whether a program passes all tests; no more are run after the first that it fails."""
    return all(passed(program, [test], function)[0] for test in tests)


def share(outcomes: Sequence[bool]) -> float:
    """The share that is true; 0 of nothing."""
    return sum(outcomes) / len(outcomes) if outcomes else 0.0


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
