"""Ten rows of each public data set, in the columns and files in which it is published; their text is ours."""

from __future__ import annotations

import base64
import io
import json
import pickle
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow
import pyarrow.parquet

Row = dict[str, Any]
TWICE = "print(int(input()) * 2 + {n})"


def json_lines(rows: Sequence[Row]) -> bytes:
    """A file of JSON lines."""
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def parquet(rows: Sequence[Row]) -> bytes:
    """A file of Parquet."""
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), file)
    return file.getvalue()


def ten(row: Callable[[int], Row], first: int = 0) -> list[Row]:
    """Rows by number."""
    return [row(number) for number in range(first, first + 10)]


def apps(n: int) -> Row:
    cases = {"inputs": [f"{case}\n" for case in range(3)], "outputs": [f"{case * 2 + n}\n" for case in range(3)]}
    text = json.dumps(cases)
    if n % 10 == 8:
        text = ""  # no tests
    if n % 10 == 9:
        text = '{"fn_name": "f", "inputs": [[' + "9" * 5000 + ']], "outputs": [1]}'  # an integer that is too long
    return {
        "id": n,
        "question": f"Print twice the number and {n} more.",
        "solutions": json.dumps([TWICE.format(n=n)]),
        "starter_code": "",
        "input_output": text,
        "difficulty": "interview",
        "url": "https://example.org",
    }


def code_contests(n: int) -> Row:
    def cases(*numbers: int) -> Row:
        return {"input": [f"{x}\n" for x in numbers], "output": [f"{x * 2 + n}\n" for x in numbers]}

    return {
        "name": f"{n}_A. Twice",
        "description": f"Print twice the number and {n} more.",
        "public_tests": cases(1),
        "private_tests": cases(2, 3),
        "generated_tests": cases(4),
        "source": 2,
        "difficulty": 7,
        "solutions": {"language": [2, 3], "solution": ["int main() {}", TWICE.format(n=n)]},
        "incorrect_solutions": {"language": [3], "solution": ["print(3)"]},
        "cf_contest_id": n,
        "cf_index": "A",
        "cf_points": 0.0,
        "cf_rating": 800,
        "cf_tags": ["math"],
        "is_description_translated": False,
        "untranslated_description": "",
        "time_limit": {"seconds": 2, "nanos": 0},
        "memory_limit_bytes": 256000000,
        "input_file": "",
        "output_file": "",
    }


def live_code_bench(n: int) -> Row:
    private = json.dumps([{"input": f"{x}\n", "output": f"{x + n}\n", "testtype": "stdin"} for x in range(3)])
    return {
        "question_title": "Add",
        "question_content": f"Print the number and {n} more.",
        "platform": "atcoder",
        "question_id": f"abc{n}",
        "contest_id": "abc",
        "contest_date": "2025-01-01T00:00:00",
        "starter_code": "",
        "difficulty": "easy",
        "public_test_cases": json.dumps([{"input": "1\n", "output": f"{1 + n}\n", "testtype": "stdin"}]),
        "private_test_cases": base64.b64encode(zlib.compress(pickle.dumps(private))).decode(),
        "metadata": "{}",
    }


def polaris(n: int) -> Row:
    answer = r"\frac{(" if n == 9 else rf"\frac{{{n}}}{{7}}"
    return {"problem": f"What is {n} by 7?", "answer": answer, "difficulty": f"{n % 8}/8"}


def aime24(n: int) -> Row:
    year = {"url": "https://example.org", "year": "2024"}
    return {"id": 60 + n, "problem": f"What is {n} + 1?", "solution": "Add.", "answer": f"{n + 1:03}", **year}


def aime25(n: int) -> Row:
    return {"problem": f"What is {n} + 2?", "answer": str(n + 2), "id": str(n)}


def olympiad_bench(n: int) -> Row:
    return {
        "id": 1600 + n,
        "question": f"Find x if $x^2 = {n}$ and $x > 0$.",
        "solution": ["Take the root."],
        "final_answer": [f"$\\sqrt{{{n + 2}}}$"] if n < 9 else ["$1$", "$2$"],
        "context": None,
        "image_1": None,
        "modality": "Text-only",
        "difficulty": "Competition",
        "is_multiple_answer": n == 9,
        "unit": None,
        "answer_type": "Expression",
        "error": None,
        "question_type": "Open-ended",
        "subfield": "Algebra",
        "subject": "Maths",
        "language": "English",
    }


def hotpotqa(n: int) -> Row:
    facts = {"title": [f"Town {n}", f"Land {n}"], "sent_id": [0, 1]}
    if n == 9:
        facts["title"] = [f"Town {n}", "elsewhere"]  # a paragraph that is not among the ten
    sentences = [[f"Town {n} lies in Land {n}.", " It is old."], ["It is wide.", f" Land {n} sells salt."], ["No."]]
    return {
        "id": f"5a{n}",
        "question": f"What does the land of Town {n} sell?",
        "answer": "salt",
        "type": "bridge",
        "level": "hard",
        "supporting_facts": facts,
        "context": {"title": [f"Town {n}", f"Land {n}", "Other"], "sentences": sentences},
    }


def two_wiki(n: int) -> Row:
    row = hotpotqa(n)
    del row["level"]
    return {**row, "type": "compositional", "evidences": {"fact": ["Town"], "relation": ["in"], "entity": ["Land"]}}


def musique(n: int) -> Row:
    texts = [("Town", f"Town {n} lies in Land {n}."), ("Land", f"Land {n} sells salt."), ("Land", "Another land.")]
    paragraphs = [
        {"idx": idx, "title": title, "paragraph_text": text, "is_supporting": idx < 2}
        for idx, (title, text) in enumerate(texts)
    ]
    first = {"id": 1, "question": "Town >> land", "answer": f"Land {n}", "paragraph_support_idx": 0}
    second = {"id": 2, "question": "#1 >> sells", "answer": "salt", "paragraph_support_idx": 1}
    return {
        "id": f"2hop__{n}",
        "paragraphs": paragraphs,
        "question": f"What does the land of Town {n} sell?",
        "question_decomposition": [first, second],
        "answer": "salt",
        "answer_aliases": ["sea salt"],
        "answerable": n < 9,
    }


def bamboogle(n: int) -> Row:
    return {"Question": f"What does the land of Town {n} sell?", "Answer": "salt"}


REPOS: dict[str, tuple[str | None, dict[str, bytes]]] = {
    "codeparrot/apps": ("mit", {"train.jsonl": json_lines(ten(apps)), "test.jsonl": json_lines(ten(apps, 10))}),
    "deepmind/code_contests": (
        "cc-by-4.0",
        {
            "data/train-00000-of-00002-1a.parquet": parquet(ten(code_contests)[:5]),
            "data/train-00001-of-00002-2b.parquet": parquet(ten(code_contests)[5:]),
            "data/valid-00000-of-00001-3c.parquet": parquet(ten(code_contests, 20)[:5]),
            "data/test-00000-of-00001-4d.parquet": parquet(ten(code_contests, 20)[5:]),
        },
    ),
    "livecodebench/code_generation_lite": (
        "cc",
        {
            "test.jsonl": json_lines(ten(live_code_bench)[:5]),
            "test2.jsonl": json_lines(ten(live_code_bench)[5:]),
            "code_generation_lite.py": b"raise SystemExit('a loading script was run')\n",
        },
    ),
    "POLARIS-Project/Polaris-Dataset-53K": ("apache-2.0", {"polaris-data-53K.jsonl": json_lines(ten(polaris))}),
    "HuggingFaceH4/aime_2024": (None, {"data/train-00000-of-00001.parquet": parquet(ten(aime24))}),
    "math-ai/aime25": ("apache-2.0", {"test.jsonl": json_lines(ten(aime25))}),
    "Hothan/OlympiadBench": (
        "apache-2.0",
        {
            "OlympiadBench/OE_TO_maths_en_COMP/OE_TO_maths_en_COMP.parquet": parquet(ten(olympiad_bench)),
            "OlympiadBench/OE_MM_maths_en_COMP/OE_MM_maths_en_COMP.parquet": b"not for us",
        },
    ),
    "hotpotqa/hotpot_qa": (
        "cc-by-sa-4.0",
        {
            "distractor/train-00000-of-00002.parquet": parquet(ten(hotpotqa)[:5]),
            "distractor/train-00001-of-00002.parquet": parquet(ten(hotpotqa)[5:]),
            "distractor/validation-00000-of-00001.parquet": parquet(ten(hotpotqa)),
            "fullwiki/train-00000-of-00002.parquet": b"not for us",
        },
    ),
    "framolfese/2WikiMultihopQA": (
        "apache-2.0",
        {
            "data/train-00000-of-00001.parquet": parquet(ten(two_wiki)),
            "data/validation-00000-of-00001.parquet": parquet(ten(two_wiki)),
            "data/test-00000-of-00001.parquet": b"has no answers",
        },
    ),
    "dgslibisey/MuSiQue": (
        None,
        {
            "musique_ans_v1.0_train.jsonl": json_lines(ten(musique)),
            "musique_ans_v1.0_dev.jsonl": json_lines(ten(musique)),
        },
    ),
    "chiayewken/bamboogle": (None, {"data/test-00000-of-00001-fd.parquet": parquet(ten(bamboogle))}),
}
"""By repository: the licence that the hub states, and the files. A script and files of other sets are among them."""
