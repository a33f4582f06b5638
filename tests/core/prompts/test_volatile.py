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
    "Sat Nov 28 2026", "Sat Nov  8 10:55:12 UTC 2026", "Sat Nov 28 2026 10:55:12", "Sat. Nov. 28", "Sat 28 Nov 2026",
    "Samstag, 28. November 2026", "Samstag, den 28. November", "28. Nov. 2026", "Sa., 28.11.2026", "Sa 28. Nov. 2026",
    "samedi 28 novembre 2026", "sam. 28 nov. 2026", "le 28 novembre", "Dimanche 11 octobre", "novembre 2026",
    "sábado 28 de noviembre de 2026", "28 de noviembre", "sáb, 28 nov 2026", "sáb. 28/11/2026", "noviembre de 2026",
    "2026年11月28日 星期六", "11月28日", "11月28日（周六）", "2026 年 11 月 28 日",
    "二〇二六年十一月二十八日", "星期六",
    "/tmp/tmpab12cd/notes.txt", "/tmp/pytest/a", r"C:\Users\me\AppData\Local\Temp\x1",
]  # fmt: skip
STEADY = [
    "in 2026", "version 3.11.7", "The month of May", "the sun, and the market", "100,000 words", "up to 12 items", 
    "1/2 or 3/4",    "gpt-4o", "facade", "deadbeef", "3.14159", "10-20 sentences", "at most 5.", 
    "section 1.2.3", "decade", "a ratio of 2:1",
    "Step 3: say so", "/usr/bin/tmp", "localhost", "{2026}", "Wed", "I may 2 times", "saturated",
    "So 3 of them", "the sun 5 times", "Do 2 things", "mar 3", "10 dimensions", "samt 12", "每周一次", "一周一次",
    "三周", "1. May I ask",
    "un domaine", "5 marzipans", "12 augments", "3 marks",
]  # fmt: skip


@pytest.mark.parametrize("text", CHANGING)
def test_what_changes(text: str) -> None:
    sentence = f"Today it is {text} in the office"
    spans = volatile(sentence)
    rest = "".join(
        sentence[a:b] for a, b in zip([0, *(e for _, e in spans)], [*(s for s, _ in spans), None], strict=True)
    )
    assert not re.search(
        r"\d{2}|day|nov|tmp|Temp|sam|sa[tb.]|sáb|月|年|周|星|Dim", rest.removeprefix("Today"), re.IGNORECASE
    )


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
