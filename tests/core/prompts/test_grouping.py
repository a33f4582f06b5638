"""Which texts are one prompt, of many texts."""

from __future__ import annotations

import random

import pytest

from cotune.prompts import grouping
from cotune.prompts.grouping import group_texts
from cotune.prompts.recorded import SeenText

WORDS = [f"word{number}" for number in range(60)]


def seen(number: int, text: str) -> SeenText:
    return SeenText(text=text, changing=[], order=(number, 0), calls={f"c{number}"}, tasks={f"t{number}"})


def similar_inputs(count: int) -> list[SeenText]:
    """Questions of the same few words in other orders: each is an input of its own."""
    rng = random.Random(0)
    return [seen(number, " ".join(rng.choices(WORDS, k=12))) for number in range(count)]


def test_many_similar_inputs_are_not_compared_each_with_each(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0

    def counted(a: grouping.Group, b: grouping.Group) -> grouping._Fit | None:
        nonlocal compared
        compared += 1
        return fit(a, b)

    fit = grouping._fit_groups
    monkeypatch.setattr(grouping, "_fit_groups", counted)
    counts = []
    for count in (1_000, 2_000, 4_000):
        compared = 0
        assert len(group_texts(similar_inputs(count))) == count
        counts.append(compared)
    assert counts[2] <= 1.2 * counts[1] <= 1.5 * counts[0] and counts[2] < 40_000


def test_a_prompt_among_many_inputs_is_found_with_all_of_its_texts() -> None:
    template = "Write a short and friendly reply to this customer of our shop: {} Never promise a refund."
    inputs = similar_inputs(2_000)
    prompts = [seen(10_000 + i, template.format(" ".join(WORDS[i % 40 : i % 40 + 5]))) for i in range(0, 3_000)]
    texts = [text for pair in zip(inputs, prompts, strict=False) for text in pair] + prompts[2_000:]
    groups = group_texts(texts)
    largest = max(groups, key=lambda group: len(group.texts))
    assert len(largest.texts) == 3_000 and len(groups) == 2_001
