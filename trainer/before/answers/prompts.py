"""Reading prompts: the options, dates, examples, JSON and forms that a prompt or a description shows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from cotune.integrations.models.chat.content import text_of

DAY = datetime(2000, 1, 15, 9, 30)
STRFTIME = {"YYYY": "%Y", "YY": "%y", "MM": "%m", "DD": "%d", "HH": "%H", "SS": "%S"}
DATE_FORM = re.compile(r"(?<!\w)(?:YYYY|YY|MM|DD|HH)(?:[-/.: T](?:YYYY|YY|MM|DD|HH|SS))+(?!\w)", re.I)
OPTIONS = re.compile(
    r"(?:(?:valid|available|allowed|known|possible|supported|existing|accepted|following)\b[^:\n]{0,40}?(?::| are| is)"
    r"|select from:|choose (?:from|one of|between):?|one of(?: the following)?[^:\n\[(]{0,30}:?|must be:?|expected:?"
    r"|options:?|either)[ \t]*([^\n]+)",
    re.I,
)
QUOTED = re.compile(r"""(?<!\w)(['"`])([^'"`\n]{1,40})\1(?!\w)""")
QUOTED_LIST = re.compile(r"""((['"`])[^'"`\n]{1,40}\2(?:, *|,? or |,? and | *\| *))+(['"`])[^'"`\n]{1,40}\3""")
PLAIN_LIST = re.compile(r"\b[\w-]+(?:, [\w-]+)+,? or [\w-]+")
EXAMPLE = re.compile(r"(?:e\.g\.|eg\.|for example|for instance|such as|example:)[ ,:]*(.{1,80})", re.I | re.S)
QUOTED_EXAMPLE = re.compile(r"(?:e\.g\.|for example|for instance|such as)[:,]? *(['\"`])([^\n]{1,200}?)\1(?!\w)", re.I)
CAPITALS = re.compile(r"\b[A-Z][A-Z_]{3,}(?: [A-Z][A-Z_]{3,})?\b")
YES_OR_NO = re.compile(r"\b(?:is|are|was|does|do|did|can|has|have|should|will)\b[^.?!\n]*\?", re.I)
EMPHASIS = re.compile(
    "ALWAYS|NEVER|MUST|ONLY|SHOULD|IMPORTANT|CRITICAL|REQUIRED|WARNING|NOTES?|YOUR|THIS|THAT|WITH|WILL|FROM|HAVE|WHEN"
    "|EACH|MORE|THAN|THEN|JSON|YAML|HTML|HTTPS?|MARKDOWN|TEXT|NULL|NONE|TRUE|FALSE|FORMAT|INPUT|OUTPUT|TASKS?|CONTEXT"
    "|RULES?|EXAMPLES?|SYSTEM|USER|ROLE|GOAL|QUESTION|ANSWER"
)
"""Words in capitals that stress or name something, and are no answers."""
MOST_OPTIONS = 8


def own_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """The application's instructions in a prompt: its system messages, and the last message."""
    instructions = [message for message in messages if message.get("role") in ("system", "developer")]
    if messages and messages[-1] not in instructions:
        instructions.append(messages[-1])
    return "\n".join(text_of(message.get("content")) for message in instructions)


def date_in(text: str) -> str:
    """Return a date or time in the form that a text asks for, such as YYYY-MM-DD; empty if it asks for none."""
    form = DATE_FORM.search(text)
    if form is None:
        return ""
    # Make a format for `strftime` of it. MM is the month in a date, and minutes behind the hours HH.
    date, hours, time = form[0].upper().partition("HH")
    template = date + hours + time.replace("MM", "%M")
    for letters, code in STRFTIME.items():
        template = template.replace(letters, code)
    return DAY.strftime(template)


def options_in(text: str) -> list[str]:
    """The options that a text lists: `select from: a, b`, `valid names are 'x' and 'y'`, `'m' or 'f'`."""
    # 1. Behind words that announce options. A single one must be in quotes: other single words are rarely options.
    for listing in OPTIONS.finditer(text):
        options = split_list(listing[1])
        is_quoted = QUOTED.search(listing[1]) is not None
        if len(options) > 1 or (options and is_quoted):
            return options[:MOST_OPTIONS]
    # 2. A list with "or", first one of quoted words.
    plain_list = QUOTED_LIST.search(text) or PLAIN_LIST.search(text)
    if plain_list is None:
        return []
    return split_list(plain_list[0])[:MOST_OPTIONS]


def split_list(text: str) -> list[str]:
    """The options that a sentence of a prompt lists: the quoted ones if there are any, otherwise the parts between
    commas, "or" and "and". Parts of more than three words are no options.
    """
    quoted = [phrase for _, phrase in QUOTED.findall(text)]
    if quoted:
        return list(dict.fromkeys(quoted))
    bracketed = re.match(r"[\[({]([^\])}]*)[\])}]", text.strip())
    sentence = bracketed[1] if bracketed else text.partition(". ")[0]
    options = []
    for part in re.split(r",|;|\||\bor\b|\band\b", sentence):
        option = part.strip(" .:`*()[]{}")
        if option and len(option.split()) <= 3 and option not in options:
            options.append(option)
    return options


def example_in(text: str) -> str:
    """The example that a description gives of a value; empty without one."""
    example = EXAMPLE.search(text)
    if example is None:
        return ""
    if quoted := QUOTED.match(example[1].lstrip("( ")):
        return quoted[2]
    return re.split(r"[,;)\n]|\. |\bor\b", example[1].strip("( "))[0].strip(" '\"`.")


def names_in(text: str, names: Sequence[str]) -> list[str]:
    """The given names that occur in a text."""
    return [name for name in dict.fromkeys(names) if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)]


def answer_words(text: str) -> list[str]:
    """Short answers that a prompt may wait for: listed options, words in capitals, quoted phrases."""
    words = [word for word in CAPITALS.findall(text) if not EMPHASIS.fullmatch(word)]
    words += ["yes", "no"] if YES_OR_NO.search(text) else []
    words += [phrase for _, phrase in QUOTED.findall(text) if not EMPHASIS.fullmatch(phrase.upper())]
    return list(dict.fromkeys([*options_in(text), *words]))[:MOST_OPTIONS]
