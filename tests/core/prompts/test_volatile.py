"""What changes from day to day is found; what only looks so is not."""

import re

import pytest

from cotune.prompts.volatile import intersection, union, volatile

CHANGING = [
    "2026-11-26", "2026-11-26T08:15:00Z", "2026-11-26 08:15:00.123 +01:00", "26.11.2026", "11/26/26",
    "26 November 2026",
    "Nov. 26, 2026", "November 26th", "the 26th of November", "November 2026", "Thursday", "Thu, 26 Nov 2026",
    "Thursday, November 26, 2026", "2026年11月26日", "08:15", "8:15 pm", "1764144000", "1764144000.123456",
    "3f2b8c1e-9d4a-4c6b-8e21-0a1b2c3d4e5f", "9f86d081884c7d659a2feaa0c55ad015", "0x7f3a2c1b9e", "0.8444218515",
    "/tmp/tmpab12cd/notes.txt", "/tmp/pytest/a", r"C:\Users\me\AppData\Local\Temp\x1",
]  # fmt: skip
STEADY = [
    "in 2026", "version 3.11.7", "The month of May", "the sun, and the market", "100,000 words", "up to 12 items", 
    "1/2 or 3/4",    "gpt-4o", "facade", "deadbeef", "3.14159", "10-20 sentences", "at most 5.", 
    "section 1.2.3", "decade", "a ratio of 2:1",
    "Step 3: say so", "/usr/bin/tmp", "localhost", "{2026}", "Wed", "I may 2 times", "saturated",
]  # fmt: skip


@pytest.mark.parametrize("text", CHANGING)
def test_what_changes(text: str) -> None:
    sentence = f"Today it is {text} in the office"
    spans = volatile(sentence)
    rest = "".join(
        sentence[a:b] for a, b in zip([0, *(e for _, e in spans)], [*(s for s, _ in spans), None], strict=True)
    )
    assert not re.search(r"\d{2}|day|Nov|tmp|Temp", rest.removeprefix("Today"))


@pytest.mark.parametrize("text", STEADY)
def test_what_stays(text: str) -> None:
    assert volatile(f"Here is {text} for you") == []


def test_a_port_of_this_machine() -> None:
    assert volatile("see http://localhost:8123/x and http://example.com:80") == [(21, 25)]


def test_what_is_kept_counts_too() -> None:
    assert volatile("Return JSON only.", [re.compile("JSON only")]) == [(7, 16)]


def test_spans() -> None:
    assert union([(4, 6), (1, 2), (2, 4), (9, 9)]) == [(1, 6)]
    assert intersection([(0, 5), (8, 10)], [(3, 9)]) == [(3, 5), (8, 9)]
