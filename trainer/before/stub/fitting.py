"""Made-up texts that fit: by the name and description of a parameter, and by an error about the last one."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime

import msgspec

_DAY = datetime(2000, 1, 15, 9, 30)
_PLACES = {"YYYY": "%Y", "YY": "%y", "MM": "%m", "DD": "%d", "HH": "%H", "SS": "%S"}
_FORM = re.compile(r"(?<!\w)(?:YYYY|YY|MM|DD|HH)(?:[-/.: T](?:YYYY|YY|MM|DD|HH|SS))+(?!\w)", re.I)
_STRFTIME = re.compile(r"%[aAbBdfHIjmMpSyYzZ](?:[-/.:, T]*%[aAbBdfHIjmMpSyYzZ])+")
_BY_NAME: Sequence[tuple[str, str]] = (
    ("datetime|timestamp", "2000-01-15T09:30:00"),
    ("date|day|deadline|birthday|departure|arrival|checkin|checkout", "2000-01-15"),
    ("timezone|tz", "UTC"),
    ("time|hour", "09:30"),
    ("year", "2000"),
    ("url|uri|link|website|webpage|href|endpoint", "https://example.org/"),
    ("email|mail", "a@example.org"),
    ("uuid|guid", "00000000-0000-4000-8000-000000000000"),
    ("expression|formula|equation|calculation", "1 + 1"),
    ("sql", "SELECT 1"),
    ("code|python|program", "print(1)"),
    ("json", "{}"),
    ("currency", "USD"),
    ("ticker|stock", "AAPL"),
    ("city|location|place|destination|origin|town", "Paris"),
    ("country", "France"),
    ("phone", "+15550100"),
    ("number|num|count|index|idx|id|amount|price|quantity|total|cost", "1"),
    ("rating|limit|age|size|minutes|hours|days|percentage|score", "1"),
)
"""Words in the name of a parameter, and a text that fits it."""
_BY_ERROR: Sequence[tuple[re.Pattern[str], str]] = tuple(
    (re.compile(said, re.I), value)
    for said, value in (
        (r"isoformat|unknown string format|valid date(?!time)|not a date", "2000-01-15"),
        (r"valid datetime", "2000-01-15T09:30:00"),
        (r"invalid literal for int|convert string to float|ConversionSyntax|valid (integer|number|decimal)", "1"),
        (r"(missing|no) scheme|unknown url|UnsupportedProtocol|(in)?valid url|relative url", "https://example.org/"),
        (r"hexadecimal UUID|valid UUID", "00000000-0000-4000-8000-000000000000"),
        (r"valid email|email address", "a@example.org"),
        (r"malformed node or string|name '\w+' is not defined|invalid syntax|cannot parse expression", "1 + 1"),
        (r"no time zone found|unknown time ?zone", "UTC"),
        (r"valid boolean", "true"),
        (r"expecting value: line|expecting property name|invalid json|not valid json|JSONDecodeError", "{}"),
    )
)  # fmt: skip
_NAMED = re.compile(
    r"(?:(?:valid|available|allowed|known|possible|supported|existing|accepted)\b[^:\n]{0,40}?(?::| are| is)"
    r"|select from:|choose (?:from|one of|between):?|one of(?: the following)?[^:\n\[(]{0,30}:?|must be:?|expected:?"
    r"|options:?|either)[ \t]*([^\n]+)",
    re.I,
)
_QUOTED = re.compile(r"""(?<!\w)(['"`])([^'"`\n]{1,40})\1(?!\w)""")
_EXAMPLE = re.compile(r"(?:e\.g\.|eg\.|for example|for instance|such as|example:)[ ,:]*(.{1,80})", re.I | re.S)
_QUOTED_EXAMPLE = re.compile(r"(?:e\.g\.|for example|for instance|such as)[:,]? *(['\"`])([^\n]{1,200}?)\1(?!\w)", re.I)
_PLAIN = re.compile(r"([a-z])\1*|stub answer \d+")
"""Texts that are used where nothing fits."""
_MOST = 8


class Manner(msgspec.Struct, frozen=True):
    """How a run's answers are made up. Where it says nothing, a value that fits, or a short text."""

    about: str = ""
    """The difference from other runs, as a phrase."""
    call_tools: bool = True
    form: bool = False
    """Whether texts are written in the form that their prompt shows."""
    text: str | None = None
    number: int | None = None
    flag: bool | None = None
    instead: Mapping[str, Sequence[str]] = {}
    """By a made-up text: texts to take in turn in its place; "" stands for any that fits nothing."""

    def put(self, text: str, variant: int, *, plain: bool) -> str:
        """The text to say for `text`; `plain` tells that it fits nothing in particular."""
        found = self.instead.get(text) or (self.instead.get("") if plain else None)
        if found:
            return found[variant % len(found)]
        return self.text if plain and self.text is not None else text


AS_IT_FITS = Manner()


def fitting(name: str, description: str, variant: int = 0, rather: str | None = None) -> str | None:
    """A text for a parameter: an example or a choice that its description gives (`rather` this one), or one that
    fits its name."""
    if found := _form_of(f"{name} {description}"):
        return found
    if choices := choices_in(description):
        return rather if rather in choices else choices[variant % len(choices)]
    if given := _EXAMPLE.search(description):
        quoted = _QUOTED.match(given[1].lstrip("( "))
        return quoted[2] if quoted else re.split(r"[,;)\n]|\. |\bor\b", given[1].strip("( "))[0].strip(" '\"`.") or None
    words = "_".join(re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)).lower()
    return next((value for known, value in _BY_NAME if re.search(rf"(?:^|_)(?:{known})s?(?:_|$)", words)), None)


def choices_in(text: str) -> list[str]:
    """The words that a text lists to choose from: `one of: a, b`, `valid names are 'x' and 'y'`, `'m' or 'f'`."""
    for found in _NAMED.finditer(text):
        if len(listed := _listed(found[1])) > 1 or (listed and _QUOTED.search(found[1])):
            return listed[:_MOST]
    either = re.search(r"""((['"`])[^'"`\n]{1,40}\2(?:, *|,? or |,? and | *\| *))+(['"`])[^'"`\n]{1,40}\3""", text)
    either = either or re.search(r"\b[\w-]+(?:, [\w-]+)+,? or [\w-]+", text)
    return _listed(either[0])[:_MOST] if either else []


def lessons(error: str, said: Collection[str]) -> dict[str, list[str]]:
    """Replacements by made-up text, from the text of an error and the made-up texts `said` before; empty where it helps
    nothing. A text that the error does not quote is not replaced, unless it quotes none: then any is, under ""."""
    values = [value for pattern, value in _BY_ERROR if pattern.search(error)][:1]
    if form := re.search(r"does not match format ['\"](.+?)['\"]", error):
        values = [_DAY.strftime(form[1])]
    values = values or [one for one in choices_in(error) if one not in said]
    return dict.fromkeys(blamed(error, said), values) if values else {}


def blamed(error: str, said: Collection[str]) -> list[str]:
    """Those of the made-up texts `said` that an error shows; "" stands for any that fits nothing, and for all."""
    found = ("" if _PLAIN.fullmatch(text) else text for text in said if text and quotes(error, text))
    return list(dict.fromkeys(found)) or [""]


def quotes(error: str, text: str) -> bool:
    """Whether an error shows a made-up text: in quotes, or long enough not to stand there by chance."""
    return repr(text) in error or f'"{text}"' in error or (len(text) > 5 and text in error)


def form_shown(prompt: str) -> str | None:
    """A text in the form that a prompt shows: a fenced block, tags, a label at the start of a line or in quotes, or an
    example in quotes."""
    parts = [example for _, example in _QUOTED_EXAMPLE.findall(prompt)]
    labels = re.findall(r"^[ \t*#-]*([A-Z][\w ]{0,30}?)\**: *([\[<{(][^\n]*)", prompt, re.M)
    labels += re.findall(r"['\"`]([A-Z][\w ]{0,30}): *([A-Z]|\d+|\.{3}|[\[<{(][^'\"`\n]*)['\"`]", prompt)
    for label, kind in dict.fromkeys(labels):
        parts.append(f"{label}: {_filled(label, kind)}")
    for tag in dict.fromkeys(re.findall(r"<(\w+)>", prompt)):
        inner = re.search(rf"<{tag}>(.*?)</{tag}>", prompt, re.S)
        if inner or re.search(rf"<{tag}> tags?\b", prompt):
            parts.append(f"<{tag}>{_filled(tag, inner[1] if inner else '')}</{tag}>")
    for language in dict.fromkeys(re.findall(r"```(\w*)", prompt)):
        parts.append(f"```{language}\n{fitting(language, '') or 'print(1)'}\n```")
        break
    return "\n".join(parts) or None


def _filled(label: str, kind: str) -> str:
    if bounds := re.search(r"(\d+) *(?:-|–|to|\.\.) *(\d+)", kind):
        return bounds[2]
    choices = choices_in(kind) or [one.strip() for one in kind.strip("[](){}<> ").split("|")]
    if len(choices) > 1:
        return choices[0]
    return "1" if re.search(r"number|int|float|score|rating|^[NX\d]", kind, re.I) else fitting(label, kind) or "a"


def _form_of(text: str) -> str | None:
    """A moment in the form that a text asks for: YYYY-MM-DD, HH:MM, %d/%m/%Y."""
    if found := _STRFTIME.search(text):
        return _DAY.strftime(found[0])
    if found := _FORM.search(text):
        hours = re.search("HH", found[0], re.I)
        made = found[0].upper()
        if hours:
            made = f"{made[: hours.start()]}{made[hours.start() :].replace('MM', '%M')}"
        for place, code in _PLACES.items():
            made = made.replace(place, code)
        return _DAY.strftime(made)
    return None


def _listed(text: str) -> list[str]:
    """The words of a list as people write it: quoted ones where there are any, else what commas divide."""
    quoted = [word for _, word in _QUOTED.findall(text)]
    if quoted:
        return list(dict.fromkeys(quoted))
    inner = re.match(r"[\[({]([^\])}]*)[\])}]", text.strip())
    parts = re.split(r",|;|\||\bor\b|\band\b", inner[1] if inner else text.split(". ")[0])
    words = [part.strip(" .:`*()[]{}") for part in parts]
    return list(dict.fromkeys(word for word in words if word and len(word.split()) <= 3))
