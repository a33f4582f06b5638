"""Rows of GSM8K, AIME and OlympiadBench in the form in which they are published."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from examples.workloads.code.datasets import DatasetError
from examples.workloads.maths import datasets

ROOT = Path(__file__).parents[4]
GSM8K = {"question": "How many?", "answer": "She has 2*36=<<2*36=72>>72.\n#### 1,072"}


def lines(path: Path, *rows: Mapping[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def olympiad(number: int, answers: Any, **fields: Any) -> dict[str, Any]:
    row = {"id": number, "question": "Find it.", "final_answer": answers, "is_multiple_answer": False, "error": None}
    return {**row, "context": None, "answer_type": "Numerical", "unit": None, **fields}


def test_gsm8k_in_parquet(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([GSM8K]), tmp_path / "train.parquet")
    assert list(datasets.gsm8k(tmp_path / "train.parquet")) == [
        {"id": "gsm8k-1", "kind": "gsm8k", "question": "How many?", "answer": "1,072", "tolerance": "0"}
    ]


def test_the_years_of_aime_under_each_of_their_field_names(tmp_path: Path) -> None:
    file = lines(
        tmp_path / "aime2025-I.jsonl",
        {"id": 60, "problem": "P", "solution": "S", "answer": "073", "url": "u", "year": "2024"},  # HuggingFaceH4
        {"ID": "2024-I-1", "Problem": "P", "Solution": "S", "Answer": 204},  # Maxwell-Jia
        {"problem": "P", "answer": "70", "id": "0"},  # math-ai
        {"question": "P", "answer": "588"},  # opencompass
    )
    made = [(task["id"], task["question"], task["answer"]) for task in datasets.aime(file) if task]
    assert made == [
        ("aime-60", "P", "073"),
        ("aime-2024-I-1", "P", "204"),
        ("aime-0", "P", "70"),
        ("aime-aime2025-I-4", "P", "588"),
    ]


def test_aime_without_degrees_and_without_rows_that_cannot_be_read(tmp_path: Path) -> None:
    written = ["336^\\circ", "$336^{\\circ}$", "336°", "336 °", "336\\degree", "336.", "a^\\circ", "336^2", "", None]
    file = lines(tmp_path / "a.jsonl", *({"problem": "P", "answer": answer} for answer in written))
    answers = [task and task["answer"] for task in datasets.aime(file)]
    assert answers == ["336"] * 6 + [None] * 4


def test_olympiadbench(tmp_path: Path) -> None:
    file = lines(
        tmp_path / "o.jsonl",
        olympiad(1, ["$2 \\sqrt{3}$"], context="Let it be."),
        olympiad(2, ["$1$,$2$"], is_multiple_answer=True),
        olympiad(3, ["3.14"], error="1e-2"),
        olympiad(4, None),
        olympiad(5, ["$a$", "$b$"]),
        olympiad(6, ["$0.1$,$0.2$"], error="0.1,0.2"),
        olympiad(7, ["$\\frac{("]),
    )
    made = list(datasets.olympiadbench(file))
    assert [task and task["answer"] for task in made] == ["2 \\sqrt{3}", "1,2", "3.14", None, None, None, None]
    assert made[0] and made[0]["question"] == "Let it be.\n\nFind it."
    assert [task["tolerance"] for task in made if task] == ["0", "0", "1/100"]


@pytest.mark.parametrize(
    ("loader", "row", "match"),
    [
        ("gsm8k", {"question": "q"}, r"row 1: no field answer; it has question"),
        ("gsm8k", {"question": "q", "answer": "seven"}, r"row 1: answer ends with 'seven', not #### 42"),
        ("aime", {"text": "q", "answer": "7"}, r"row 1: no text problem with an answer; it has text, answer"),
        ("aime", {"problem": "q"}, r"row 1: no text problem with an answer; it has problem"),
        ("olympiadbench", {"id": 1, "question": "q"}, "no field final_answer, error"),
    ],
)
def test_a_file_of_something_else_is_named_with_what_it_lacks(
    loader: str, row: Mapping[str, Any], match: str, tmp_path: Path
) -> None:
    with pytest.raises(DatasetError, match=match):
        list(datasets.LOADERS[loader](lines(tmp_path / "x.jsonl", row)))


def test_the_command_prints_problems_and_counts_what_it_leaves_out(tmp_path: Path) -> None:
    file = lines(tmp_path / "o.jsonl", olympiad(1, ["$\\sqrt{3}$"]), olympiad(2, None), olympiad(3, ["4"]))
    command = [sys.executable, "-m", "examples.workloads.maths.tasks", "--olympiadbench", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == ["olympiadbench-1", "olympiadbench-3"]
    assert done.stderr == (
        "2 problems, 1 of them with an expression as the answer; 1 rows without one answer are left out\n"
    )
    done = subprocess.run([*command, "none"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "none is no file; pass --download to fetch a public data set\n")
