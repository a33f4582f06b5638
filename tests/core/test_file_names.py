"""Roles as names of files: of any length, with any character."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotune.file_names import LONGEST, file_name, readable_file_name

ODD = [
    "team/writer",
    "Analyst [senior]",
    "\u7814" * 86,
    "a" * 300,
    "..",
    "../up",
    "",
    " ",
    "CON:",
    "a\0b",
    "*?",
    "\ud83d",
]


def test_plain_names_stay_as_they_are() -> None:
    assert [file_name(name) for name in ("writer", "web-search_2.b", "writer@3")] == [
        "writer",
        "web-search_2.b",
        "writer@3",
    ]


@pytest.mark.parametrize("name", ODD)
def test_any_name_is_a_file(tmp_path: Path, name: str) -> None:
    for made in (file_name(name), readable_file_name(name, [])):
        assert "/" not in made and made not in ("", ".", "..")
        assert len(made.encode()) <= LONGEST
        file = tmp_path / f"{made}.safetensors"
        file.write_text("x")
        assert file.parent == tmp_path


@given(st.lists(st.text(max_size=200) | st.sampled_from(ODD), min_size=2, max_size=2, unique=True))
def test_different_names_are_different_files(names: list[str]) -> None:
    first, second = (file_name(name).lower() for name in names)
    assert first != second


def test_readable_names_get_numbers() -> None:
    taken: list[str] = []
    for name in ("a b", "a_b", "A/B", "README.md"):
        taken.append(readable_file_name(name, [*taken, "readme.md"]))
    assert taken == ["a_b", "a_b-2", "A_B-3", "README.md-2"]
