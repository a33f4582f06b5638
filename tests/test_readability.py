"""The product does not become harder to read: its figures stay within 5% of the stored ones. After a change that
improves them, `python tests/readability.py --update` stores the new ones."""

from __future__ import annotations

import ast
import json
from collections import Counter
from pathlib import Path

import pytest

from tests.readability import LAYERS, MORE_IS_BETTER, STORED, Counts, count_file, is_dense, measure, two_way_pairs

TOLERANCE = 0.05
ROUNDING = 0.005
"""Stored figures have two decimals."""


def is_worse(name: str, value: float, stored: float) -> bool:
    if name in MORE_IS_BETTER:
        return value < stored * (1 - TOLERANCE) - ROUNDING
    return value > stored * (1 + TOLERANCE) + ROUNDING


def test_the_product_is_no_harder_to_read_than_its_stored_figures():
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    _, figures = measure()
    assert figures.keys() == stored.keys()
    worse = {name: (value, stored[name]) for name, value in figures.items() if is_worse(name, value, stored[name])}
    assert worse == {}, "measured and stored; `python tests/readability.py --worst 10` names the files to look at"


def test_a_figure_is_worse_beyond_five_percent_in_its_own_direction():
    assert [is_worse("what", value, 2.0) for value in (1.0, 2.1, 2.2)] == [False, False, True]
    assert [is_worse("comments per 100 lines", value, 2.0) for value in (1.8, 1.9, 3.0)] == [True, False, False]


SOURCE = '''"""What it is: that of others."""

def _helper(self, a, b, c, d, e, f, g, h, *, i):
    # Such is life.
    found = [x for x in a]  # noqa: C416
    return {x: y for x, y in zip(a, b)} if found else None

def use():
    raise ValueError("what?", _helper)
'''


def test_each_figure_counts_its_symptom():
    counts = Counts()
    count_file(Path("module.py"), SOURCE, counts)
    assert counts.totals == Counter(
        {
            "lines": 9,
            "words": 10,
            "assignments": 4,
            "comments": 1,
            "comprehensions": 2,
            "dense comprehensions": 1,
            "conditional expressions": 1,
            "private functions used once": 1,
            "functions with more than 8 parameters": 1,
            "vague names": 1,
            "what": 2,
            "those of, that of": 1,
            "such (as a noun), of which, by which": 1,
        }
    )
    assert counts.by_file["what"] == {Path("module.py"): 2}


@pytest.mark.parametrize(
    ("expression", "dense"),
    [
        ("[f(x) for x in a if x]", False),
        ("{k: v for k, v in a.items()}", False),
        ("[x for x in a if x if f(x)]", True),
        ("[x for b in a for x in b]", True),
        ("[x + y for x, y in zip(a, b)]", True),
        ("[x for x, y, z in a]", True),
        ("[[y for y in x] for x in a]", True),
    ],
)
def test_a_comprehension_that_does_more_than_one_thing_is_dense(expression: str, dense: bool):
    assert is_dense(ast.parse(expression, mode="eval").body) == dense


def test_rooms_that_import_each_other_are_found(tmp_path: Path):
    for layer in LAYERS:
        (tmp_path / layer / "left").mkdir(parents=True)
    (tmp_path / "core/left/a.py").write_text("from cotune.right import b\n")
    (tmp_path / "core/right.py").write_text("def later():\n    import cotune.left.a\n")
    (tmp_path / "trainer/left/a.py").write_text("from cotune.trainer.right import b\nfrom cotune.left import a\n")
    (tmp_path / "trainer/right.py").write_text("")
    assert two_way_pairs(tmp_path) == ["core/left <-> core/right"]
