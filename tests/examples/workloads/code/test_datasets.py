"""Rows of APPS, CodeContests and LiveCodeBench in the form in which they are published."""

from __future__ import annotations

import base64
import json
import pickle
import subprocess
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from examples.workloads.code import datasets, mutants, verifier

ROOT = Path(__file__).parents[4]
DOUBLE = "print(int(input()) * 2 + 1)"


def lines(path: Path, *rows: Mapping[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def apps_row(number: int, cases: Any, solutions: Sequence[str] = (DOUBLE,), starter: str = "") -> dict[str, Any]:
    return {
        "problem_id": number,
        "question": "Twice and one more.",
        "solutions": json.dumps(solutions) if solutions else "",
        "input_output": json.dumps(cases) if cases else "",
        "difficulty": "introductory",
        "url": "u",
        "starter_code": starter,
    }


def test_apps(tmp_path: Path) -> None:
    called = {"fn_name": "twice", "inputs": [[3], [4]], "outputs": [[6], [8]]}
    file = lines(
        tmp_path / "train.jsonl",
        apps_row(7, {"inputs": ["1\n", "2\n", "3\n"], "outputs": ["3\n", "5\n", ["7"]]}),
        apps_row(8, called, ["def twice(n):\n    return n * 2"], "def twice(n):"),
        apps_row(9, None),
    )
    first, second, without_tests = datasets.apps(file, most=2)
    assert first is not None and second is not None and without_tests is None
    assert (first["id"], first["function"], first["reference"]) == ("apps-train-7", "", DOUBLE)
    assert first["tests"] == [{"input": "1\n", "output": "3\n"}, {"input": "2\n", "output": "5\n"}]
    assert verifier.solved(first["reference"], first) == 1
    assert first["wrong"] and all(verifier.solved(program, first) < 1 for program in first["wrong"])
    assert second["question"].endswith("\n\ndef twice(n):") and second["function"] == "twice"
    assert verifier.solved(second["reference"], second) == 1


def test_codecontests_in_parquet(tmp_path: Path) -> None:
    def cases(*pairs: tuple[str, str]) -> dict[str, list[str]]:
        return {"input": [given for given, _ in pairs], "output": [out for _, out in pairs]}

    row = {
        "name": "1_A. Twice",
        "description": "Twice and one more.",
        "public_tests": cases(("1\n", "3\n")),
        "private_tests": cases(("2\n", "5\n")),
        "generated_tests": cases(("3\n", "7\n"), ("4\n", "9\n")),
        "solutions": {"language": [2, 3], "solution": ["int main() {}", DOUBLE]},
        "incorrect_solutions": {"language": [1, 3], "solution": ["print 1", "print(3)"]},
    }
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "train.parquet")
    (made,) = datasets.codecontests(tmp_path / "train.parquet", most=2)
    assert (made["id"], made["reference"], made["wrong"]) == ("codecontests-1_A. Twice", DOUBLE, ["print(3)"])
    assert made["examples"] == [{"input": "1\n", "output": "3\n"}]
    assert [test["output"] for test in made["tests"]] == ["5\n", "7\n"]
    assert verifier.solved(DOUBLE, made) == 1


def lcb_row(private: str, function: str = "") -> dict[str, Any]:
    public = [{"input": "[1, 2]\n3", "output": "[1, 2, 3]", "testtype": "functional" if function else "stdin"}]
    return {
        "question_id": "q1",
        "question_content": "Join.",
        "starter_code": "class Solution:" if function else "",
        "public_test_cases": json.dumps(public),
        "private_test_cases": private,
        "metadata": json.dumps({"func_name": function} if function else {}),
    }


def packed(value: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def test_livecodebench(tmp_path: Path) -> None:
    private = json.dumps([{"input": "[4]\n5", "output": "[4, 5]", "testtype": "functional"}])
    file = lines(tmp_path / "test6.jsonl", lcb_row(packed(private), "join"), lcb_row(private))
    called, plain = datasets.livecodebench(file, most=9)
    assert called["tests"] == [{"input": "[[4], 5]", "output": "[4, 5]"}]
    assert called["examples"] == [{"input": "[[1, 2], 3]", "output": "[1, 2, 3]"}]
    assert verifier.solved("class Solution:\n    def join(self, a, b):\n        return a + [b]", called) == 1
    assert plain["tests"] == [{"input": "[4]\n5", "output": "[4, 5]"}] and plain["reference"] == ""


def test_a_pickle_that_would_run_something_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    file = lines(tmp_path / "test.jsonl", lcb_row(packed(Evil())))
    with pytest.raises(datasets.DatasetError, match="only text is read"):
        list(datasets.livecodebench(file, most=9))
    assert not (tmp_path / "ran").exists()


def test_a_file_that_is_not_of_the_data_set_is_named_with_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(datasets.DatasetError, match=r"row 1: no field solutions, input_output; it has question"):
        list(datasets.apps(lines(tmp_path / "x.jsonl", {"question": "q"}), most=1))
    with pytest.raises(datasets.DatasetError, match="is no file"):
        list(datasets.apps(tmp_path / "none.jsonl", most=1))
    (tmp_path / "x.jsonl").write_text("so\n")
    with pytest.raises(datasets.DatasetError, match="line 1: not JSON"):
        list(datasets.apps(tmp_path / "x.jsonl", most=1))


def test_wrong_programs_differ_in_one_place_each() -> None:
    assert set(mutants.changed("print(n + 1 if n < 3 else m + 1)")) == {
        "print(n - 1 if n < 3 else m + 1)",
        "print(n + 2 if n < 3 else m + 1)",
        "print(n + 1 if n <= 3 else m + 1)",
        "print(n + 1 if n < 4 else m + 1)",
        "print(n + 1 if n < 3 else m - 1)",
        "print(n + 1 if n < 3 else m + 2)",
    }
    assert list(mutants.changed("print 'of Python 2'")) == []


def test_the_command_prints_problems_and_counts_those_without_programs(tmp_path: Path) -> None:
    row = lcb_row(json.dumps([{"input": "1", "output": "1"}]))
    file = lines(tmp_path / "test6.jsonl", {**row, "public_test_cases": "[]", "private_test_cases": "[]"}, row)
    command = [sys.executable, "-m", "examples.workloads.code.tasks", "--livecodebench", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["id"] == "livecodebench-q1"
    assert done.stderr == (
        "1 problems, 1 of them without a right and a wrong program, which teach the tester nothing; "
        "1 rows without tests are left out\n"
    )
    done = subprocess.run([*command, "none"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "none is no file; pass --download to fetch a public data set\n")
