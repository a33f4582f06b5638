"""Parts of a text that change from day to day or between processes. They are never constant, even if all records have
the same value."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

Span = tuple[int, int]
"""The start and the end (excluded) of a part of a text."""

_ENGLISH_MONTH = (
    "(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?|"
    "Nov(?:ember)?|Dec(?:ember)?)"
)
# German, French and Spanish; in any case, as French and Spanish write months small.
_OTHER_MONTH = (
    "(?i:Jan(?:uar)?|Jänner|Febr?(?:uar)?|März?|Mrz|Apr(?:il)?|Mai|Juni?|Juli?|Aug(?:ust)?|Sept?(?:ember)?|"
    "Okt(?:ober)?|Nov(?:ember)?|Dez(?:ember)?|"
    "janv(?:ier)?|févr?(?:ier)?|mars|avr(?:il)?|juin|juil(?:let)?|août|septembre|octobre|novembre|déc(?:embre)?|"
    "ene(?:ro)?|febrero|mar(?:zo)?|abr(?:il)?|mayo|junio|julio|ago(?:sto)?|sep?tiembre|oct(?:ubre)?|noviembre|"
    "dic(?:iembre)?)"
)
_MONTH = f"(?:{_ENGLISH_MONTH}|{_OTHER_MONTH})"
_NTH = r"\d{1,2}(?:st|nd|rd|th|er|º|°)?"
_YEAR = r"(?:,?(?: del?)? \d{4}\b)"
_DAY_MONTH = rf"(?:{_NTH}(?: of| de)? {_MONTH}|\d{{1,2}}\. {_OTHER_MONTH})\b\.?{_YEAR}?"  # "1. May" may begin a list
_MONTH_DAY = rf"{_ENGLISH_MONTH}\.? {{1,2}}{_NTH}(?!\w){_YEAR}?"

# A full weekday counts anywhere; an abbreviated one only before a date, as "Sat", "So" and "mar" are words too.
_DAY = (
    "(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day|"
    "(?:Mon|Diens|Donners|Frei|Sams|Sonn)tag|Mittwoch|Sonnabend|"
    "(?i:lundi|mardi|mercredi|jeudi|vendredi|samedi|dimanche)|"
    "(?i:lunes|martes|miércoles|jueves|viernes|sábado|domingo)|"
    rf"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)(?=,|\.?,? \d|\.? {_ENGLISH_MONTH}\b)|"
    rf"(?:Mo|Di|Mi|Do|Fr|Sa|So)(?=\.?,? \d{{1,2}}\. ?(?:{_MONTH}\b|\d))|"
    rf"(?i:lun|mar|mer|jeu|ven|sam|dim|mié|jue|vie|sáb|dom)(?=\.?,? \d{{1,2}}(?:/\d|(?:er)?(?: de)? {_MONTH}\b))"
)
_CHINESE_NUMBER = "[一二三四五六七八九十]{1,3}"
_DATED = (
    # uuids, digests, and other long numbers in hex
    r"(?<![0-9a-fA-F])[0-9a-fA-F]{8}-?(?:[0-9a-fA-F]{4}-?){3}[0-9a-fA-F]{12}(?![0-9a-fA-F])",
    r"\b(?=[0-9a-fA-F]*\d)(?=[0-9a-fA-F]*[a-fA-F])[0-9a-fA-F]{12,}\b",
    r"\b0x[0-9a-fA-F]{6,}\b",
    # dates, with a time or without
    r"(?<!\d)\d{4}([-/.])\d{1,2}\1\d{1,2}(?!\d)"
    r"(?:[T ]\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?: ?(?:Z|UTC|[+-]\d{2}:?\d{2}))?)?",
    r"(?<![\d.])\d{1,2}([-/.])\d{1,2}\1(?:\d{4}|\d{2})(?!\.?\d)",
    rf"\b{_DAY_MONTH}",
    rf"\b{_MONTH_DAY}(?: \d{{1,2}}:\d{{2}}:\d{{2}}(?: [A-Z]{{3,5}})? \d{{4}}\b)?",
    rf"\b{_MONTH}\.?,?(?: de)? \d{{4}}\b",
    r"\d{4} ?年(?: ?\d{1,2} ?月(?: ?\d{1,2} ?[日号])?)?|\d{1,2} ?月 ?\d{1,2} ?[日号]",
    # times of the day, and seconds since the epoch
    r"(?<![\d:])\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?: ?[AaPp]\.?[Mm]\b\.?)?(?![\d:])",
    r"(?<![\d.])1\d{9}(?:\d{3}){0,3}(?:\.\d+)?(?!\d)",
    # random numbers
    r"(?<![\d.])\d*\.\d{6,}(?:[eE]-?\d+)?",
    # ports of this machine
    r"(?<=localhost:)\d{2,5}\b|(?<=127\.0\.0\.1:)\d{2,5}\b|(?<=\[::1\]:)\d{2,5}\b",
)
"""Patterns that contain a digit."""
_UNDATED = (
    # days of the week, with the date that follows
    rf"\b(?:{_DAY})\b\.?(?:,? (?:the |den |le |el )?(?:{_DAY_MONTH}|{_MONTH_DAY}))?",
    r"(?:星期|礼拜)[一二三四五六日天]|(?<![一二两三四五六七八九十每上下\d])周[一二三四五六日](?![次个天年月人])",
    rf"[〇零一二三四五六七八九]{{4}}年(?:{_CHINESE_NUMBER}月(?:{_CHINESE_NUMBER}[日号])?)?|"
    rf"{_CHINESE_NUMBER}月{_CHINESE_NUMBER}[日号]",
    # temporary files
    r"(?:/private)?(?:/tmp|/var/folders|/var/tmp|/dev/shm)/[\w./+=-]+",
    r"\b[A-Z]:\\[^\s\"'<>|]*\\Temp\\[^\s\"'<>|]+",
)
_WITHOUT_DIGITS = tuple(map(re.compile, _UNDATED))
_PATTERNS = (*map(re.compile, _DATED), *_WITHOUT_DIGITS)
"""Texts in prompts that come from clock, uuid, random and the machine."""
_DIGIT = re.compile(r"\d")


def volatile(text: str, keep: Sequence[re.Pattern[str]] = ()) -> list[Span]:
    """The spans of a text that must become slots, because they probably differ in the next run: dates, times, ids,
    temporary files.

    `keep` are the user's own patterns for text that no edit may change, so its spans become slots too.
    """
    # Most patterns need a digit. A search for one is much faster than trying all patterns.
    patterns = _PATTERNS if _DIGIT.search(text) else _WITHOUT_DIGITS
    spans: list[Span] = []
    for pattern in (*patterns, *keep):
        spans += [match.span() for match in pattern.finditer(text)]
    return union(spans)


def union(spans: Iterable[Span]) -> list[Span]:
    """Spans in order, without empty ones. Spans that overlap or touch are joined."""
    joined: list[Span] = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if joined and start <= joined[-1][1]:
            last_start, last_end = joined[-1]
            joined[-1] = last_start, max(end, last_end)
        else:
            joined.append((start, end))
    return joined


def intersection(some: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """The common parts of two unions of spans."""
    common = []
    for start, end in some:
        for other_start, other_end in others:
            common.append((max(start, other_start), min(end, other_end)))
    return union(common)
