"""Templates read back what they filled, in one way, or not at all."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotune.prompts.templates import AMBIGUOUS, Template, fault_of

TEXTS = st.text("ab {}", max_size=6)


@st.composite
def templates(draw) -> Template:
    texts = draw(st.lists(st.text("ab {}", min_size=1, max_size=4), max_size=5))
    pieces: list[str | int] = []
    for number, text in enumerate(texts, 1):
        pieces += [text, number]
    if draw(st.booleans()) and pieces:
        pieces.pop()
    if draw(st.booleans()):
        pieces = [1, *(piece + 1 if isinstance(piece, int) else piece for piece in pieces)]
    return Template.of(pieces)


def readings(template: Template, text: str) -> set[tuple[str, ...]]:
    """All ways to read a text, by trying them."""
    found = set()

    def read(pieces: tuple, rest: str, values: tuple[str, ...]) -> None:
        if not pieces:
            if not rest:
                found.add(values)
        elif isinstance(pieces[0], str):
            if rest.startswith(pieces[0]):
                read(pieces[1:], rest[len(pieces[0]) :], values)
        else:
            for end in range(len(rest) + 1):
                read(pieces[1:], rest[end:], (*values, rest[:end]))

    read(template.pieces, text, ())
    return found


@settings(max_examples=200, deadline=None)
@given(templates(), st.data())
def test_a_text_is_read_as_trying_all_ways_does(template: Template, data) -> None:
    filled = template.fill([data.draw(TEXTS) for _ in template.slots])
    for text in (filled, data.draw(st.text("ab {}", max_size=12))):
        ways = readings(template, text)
        match = template.match(text)
        if len(ways) == 1:
            assert match == ways.pop()
        else:
            assert match is (AMBIGUOUS if ways else None)


ODD = {
    "braces": ("Use {name} and {{this}} for ", "%s and \\1 ${x}", " now."),
    "json": ('{"role": "', 'x", "y": "', '", "list": [1, 2]}'),
    "xml": ("<task>\n", "<task>inner</other>", "\n</task>"),
    "other alphabets": ("以下のメールを確認して：", "注文 123", "。返事を書いて。🙂"),
    "right to left": ("שלום ", "عالم", " סוף"),
    "combining": ("Cafe\u0301 ", "é", " e\u0301nd"),
    "line ends": ("one\r\ntwo\n\n", "\r\n", "\x00\u2028end"),
    "large": ("x" * 25_000 + " ", "value", " " + "y" * 25_000),
    "a pattern": ("^(.*)$ [a-z]+ ", "(.*", " \\Z"),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_texts_are_read_back(name: str) -> None:
    before, value, after = ODD[name]
    template = Template.of([before, 1, after])
    assert template.match(before + value + after) == (value,)
    assert template.match(before + after) == ("",)
    assert template.match(before + value + after[:-1]) is None
    assert template.match("." + before + value + after) is None


def test_a_text_that_stands_twice_is_ambiguous() -> None:
    template = Template.of([1, "\n---\n", 2])
    assert template.match("a\n---\nb") == ("a", "b")
    assert template.match("a\n---\nb\n---\nc") is AMBIGUOUS


def test_a_slot_takes_what_looks_like_the_end() -> None:
    template = Template.of(["Say: ", 1, " End."])
    assert template.match("Say: a End. b End.") == ("a End. b",)


def test_slots_are_filled_in_any_order() -> None:
    assert Template.of([2, " then ", 1]).fill(["first", "second"]) == "second then first"


def test_neighbouring_texts_become_one() -> None:
    assert Template.of(["a", "", "b", 1, ""]).pieces == ("ab", 1)


def test_reach_says_how_far_a_text_fits() -> None:
    template = Template.of(["Write about ", 1, ", please."])
    assert template.reach("Write a poem") == len("Write a")
    assert template.reach("Write about cats, now.") == len("Write about ")


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        (["a", 1, "b"], [1, "c"], ""),
        (["a", 1], ["c"], "slot 1 is lost"),
        (["a", 1], [1, "and", 1], "slot 1 occurs twice"),
        (["a", 1], [1, 2], "slot 2 is unknown"),
        (["a", "b"], None, "are adjacent"),
        ([1, 2], None, "are adjacent"),
        (["a", 2], None, "not numbered"),
        (["", 1], None, "empty"),
    ],
)
def test_what_is_wrong_with_a_template(old, new, fault: str) -> None:
    found = fault_of(Template(tuple(old)), None if new is None else Template(tuple(new)))
    assert bool(found) == bool(fault) and re.search(fault, found)
