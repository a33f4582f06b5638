"""The public data sets as problems, from files of JSON lines or Parquet, which `tasks.py --download` fetches.

| data set | Hugging Face id | files |
|---|---|---|
| GSM8K | openai/gsm8k | main/train-00000-of-00001.parquet, main/test-00000-of-00001.parquet |
| AIME 2024 | HuggingFaceH4/aime_2024 | data/train-00000-of-00001.parquet |
| AIME 2024 | Maxwell-Jia/AIME_2024 | aime_2024_problems.parquet |
| AIME 2025 | math-ai/aime25 | test.jsonl |
| AIME 2025 | opencompass/AIME2025 | aime2025-I.jsonl, aime2025-II.jsonl |
| OlympiadBench | Hothan/OlympiadBench | OlympiadBench/OE_TO_maths_en_COMP/OE_TO_maths_en_COMP.parquet |
| POLARIS | POLARIS-Project/Polaris-Dataset-53K | polaris-data-53K.jsonl |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from examples.workloads.data_files import DatasetError, rows, text_id
from examples.workloads.maths.answers import number, plain
from examples.workloads.maths.verifier import Problem, readable

MARK = "####"
"""What stands before the answer of GSM8K's solutions."""
DEGREES = re.compile(r"\s*(?:\^\s*\\circ|\^\s*\{\s*\\circ\s*\}|\\degree|°)$")
"""Degrees at the end of an answer. The competition asks for the number alone."""


def gsm8k(file: Path) -> Iterator[Problem | None]:
    """GSM8K, openai/gsm8k. Fields question and answer: a solution, and after #### a whole number."""
    for number_of_row, row in enumerate(rows(file, "question", "answer"), 1):
        _, mark, answer = row["answer"].rpartition(MARK)
        if not mark or number(plain(answer)) is None:
            raise DatasetError(f"{file}, row {number_of_row}: answer ends with {row['answer'][-40:]!r}, not {MARK} 42")
        yield _problem("gsm8k", number_of_row, row["question"], answer)


def aime(file: Path) -> Iterator[Problem | None]:
    """AIME 2024 and 2025, HuggingFaceH4/aime_2024, Maxwell-Jia/AIME_2024, math-ai/aime25, opencompass/AIME2025. Fields
    problem (Problem, question) and answer (Answer), a whole number, with or without degrees; id, ID where there is one.
    Left out are rows whose answer is no number."""
    for number_of_row, row in enumerate(rows(file), 1):
        fields = {name.lower(): value for name, value in row.items()}
        question = fields.get("problem", fields.get("question"))
        if not isinstance(question, str) or "answer" not in fields:
            raise DatasetError(f"{file}, row {number_of_row}: no text problem with an answer; it has {', '.join(row)}")
        answer = DEGREES.sub("", plain(str(fields["answer"])) or "")
        if number(answer) is None:
            yield None
            continue
        yield _problem("aime", fields.get("id", f"{file.stem}-{number_of_row}"), question, answer)


def olympiadbench(file: Path) -> Iterator[Problem | None]:
    """OlympiadBench, Hothan/OlympiadBench, config OE_TO_maths_en_COMP: open-ended, text only. Fields id, question,
    context, final_answer (a list of one text), error (how far a number may be from it, or nothing). Left out are rows
    without one final answer, those whose answer math-verify cannot read, and those with errors that are no number."""
    for row in rows(file, "id", "question", "final_answer", "error"):
        answers, tolerance = row["final_answer"] or [], _tolerance(row["error"])
        answer = plain(str(answers[0]).replace("$", "")) if len(answers) == 1 else None
        if answer is None or tolerance is None or not readable(answer):
            yield None
            continue
        question = "\n\n".join(text for text in (row.get("context"), row["question"]) if text)
        yield _problem("olympiadbench", row["id"], question, answer, str(tolerance))


def polaris(file: Path) -> Iterator[Problem | None]:
    """POLARIS, POLARIS-Project/Polaris-Dataset-53K. Fields problem, answer (a number or LaTeX). Left out are rows whose
    answer math-verify cannot read, and problems that come again."""
    names: set[str] = set()
    for row in rows(file, "problem", "answer"):
        answer = plain(str(row["answer"]).replace("$", ""))
        name = text_id(row["problem"])
        if answer is None or name in names or not readable(answer):
            yield None
            continue
        names.add(name)
        yield _problem("polaris", name, row["problem"], answer)


LOADERS: Mapping[str, Callable[[Path], Iterator[Problem | None]]] = {
    "gsm8k": gsm8k,
    "aime": aime,
    "olympiadbench": olympiadbench,
    "polaris": polaris,
}
"""By name: a function of a file; None for a row that is left out."""


def _tolerance(error: Any) -> Fraction | None:
    try:
        return Fraction(str(error or "0"))
    except ValueError:
        return None


def _problem(kind: str, name: Any, question: str, answer: str, tolerance: str = "0") -> Problem:
    written = plain(answer) or ""
    return {"id": f"{kind}-{name}", "kind": kind, "question": question, "answer": written, "tolerance": tolerance}
