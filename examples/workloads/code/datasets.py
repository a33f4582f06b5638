"""The public data sets as problems, from files of JSON lines or Parquet, which `tasks.py --download` fetches.

| data set | Hugging Face id | files |
|---|---|---|
| APPS | codeparrot/apps | train.jsonl, test.jsonl |
| CodeContests | deepmind/code_contests | data/*.parquet |
| LiveCodeBench | livecodebench/code_generation_lite | test.jsonl to test6.jsonl |
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from examples.workloads.code.mutants import wrong_programs
from examples.workloads.code.programs import Test
from examples.workloads.code.verifier import Problem
from examples.workloads.data_files import DatasetError, rows

PYTHON3 = 3
"""`language` of a solution in CodeContests: 0 unknown, 1 Python 2, 2 C++, 3 Python 3, 4 Java."""
WRONG = 4
"""Most wrong programs of a problem."""


def apps(file: Path, most: int) -> Iterator[Problem | None]:
    """APPS, codeparrot/apps. Fields problem_id (or id), question, solutions, input_output, starter_code; the third and
    fourth are JSON. Its wrong programs are changed right ones that fail a hidden test. Both splits count from 0, so an
    id has the name of the file, too."""
    for row in rows(file, "question", "solutions", "input_output"):
        try:
            cases = json.loads(row["input_output"] or "{}")
            pairs = list(zip(cases.get("inputs", []), cases.get("outputs", []), strict=True))[:most]
        except ValueError:
            # Some rows have integers of more than 4,300 digits, which Python refuses to read, also in the sandbox.
            yield None
            continue
        if not pairs:
            yield None
            continue
        function = cases.get("fn_name") or ""
        tests = [_apps_call(*pair) if function else Test(input=_text(pair[0]), output=_text(pair[1])) for pair in pairs]
        reference = next(iter(json.loads(row["solutions"] or "[]")), "")
        starter = row.get("starter_code")
        yield {
            "id": f"apps-{file.stem}-{row.get('problem_id', row.get('id'))}",
            "question": row["question"] + (f"\n\n{starter}" if starter else ""),
            "examples": [],
            "tests": tests,
            "function": function,
            "reference": reference,
            "wrong": wrong_programs(reference, tests, function, WRONG),
        }


def codecontests(file: Path, most: int) -> Iterator[Problem | None]:
    """CodeContests, deepmind/code_contests. Fields name, description; public_tests, private_tests, generated_tests,
    each with lists input and output; solutions, incorrect_solutions, each with lists language and solution. Only Python
    3 is taken."""
    tested = ("public_tests", "private_tests", "generated_tests")
    for row in rows(file, "name", "description", *tested, "solutions", "incorrect_solutions"):
        public, private, generated = (
            [Test(input=given, output=out) for given, out in zip(row[name]["input"], row[name]["output"], strict=True)]
            for name in tested
        )
        tests = [*private, *generated][:most] or public[:most]
        problem: Problem = {
            "id": f"codecontests-{row['name']}",
            "question": row["description"],
            "examples": public if private or generated else [],
            "tests": tests,
            "function": "",
            "reference": next(iter(_python(row["solutions"])), ""),
            "wrong": _python(row["incorrect_solutions"])[:WRONG],
        }
        yield problem if tests else None


def livecodebench(file: Path, most: int) -> Iterator[Problem | None]:
    """LiveCodeBench, livecodebench/code_generation_lite. Fields question_id, question_content, starter_code, metadata,
    public_test_cases and private_test_cases (JSON; private ones also in base64 of zlib of pickle of JSON). It has no
    right programs: for evaluation."""
    for row in rows(file, "question_id", "question_content", "public_test_cases", "private_test_cases"):
        function = json.loads(row.get("metadata") or "{}").get("func_name") or ""
        public, private = (
            [_lcb_call(case) if function else Test(input=case["input"], output=case["output"]) for case in _cases(text)]
            for text in (row["public_test_cases"], row["private_test_cases"])
        )
        starter = row.get("starter_code")
        problem: Problem = {
            "id": f"livecodebench-{row['question_id']}",
            "question": row["question_content"] + (f"\n\n{starter}" if starter else ""),
            "examples": public,
            "tests": (private or public)[:most],
            "function": function,
            "reference": "",
            "wrong": [],
        }
        yield problem if problem["tests"] else None


LOADERS: Mapping[str, Callable[[Path, int], Iterator[Problem | None]]] = {
    "apps": apps,
    "codecontests": codecontests,
    "livecodebench": livecodebench,
}
"""By name: a function of a file and of the most hidden tests that a problem gets; None for a row without tests."""


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "\n".join(map(str, value))


def _apps_call(arguments: list[Any], result: Any) -> Test:
    """The result may be wrapped into a list: either is right."""
    test = Test(input=json.dumps(arguments), output=json.dumps(result))
    if isinstance(result, list) and len(result) == 1:
        test["also"] = json.dumps(result[0])
    return test


def _lcb_call(case: Mapping[str, str]) -> Test:
    """The arguments stand in lines, each in JSON."""
    arguments = [json.loads(line) for line in case["input"].splitlines() if line.strip()]
    return Test(input=json.dumps(arguments), output=case["output"])


def _python(programs: Mapping[str, list[Any]]) -> list[str]:
    pairs = zip(programs["language"], programs["solution"], strict=True)
    return [text for language, text in pairs if language in (PYTHON3, "PYTHON3")]


class _OnlyText(pickle.Unpickler):
    """Reads a pickled text; a pickle that names a class or function is refused."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise DatasetError(f"private_test_cases name {module}.{name}: only text is read from them")


def _cases(text: str) -> list[dict[str, str]]:
    try:
        cases: list[dict[str, str]] = json.loads(text)
    except json.JSONDecodeError:
        packed = zlib.decompress(base64.b64decode(text))
        cases = json.loads(_OnlyText(io.BytesIO(packed)).load())
    return cases
