"""Answers as the roles write them: one value, in the last line or in a box, as a number or in LaTeX."""

from __future__ import annotations

import math
import re
from fractions import Fraction

from examples.workloads.sandbox.bubblewrap import Ran

MOST = 400
"""Characters of an answer; longer ones are in the wrong form."""
_SAID = "Answer:"
_WHOLE = r"[0-9]{1,3}(?:(?:,|\{,\})[0-9]{3})+|[0-9]+"
_DECIMAL = re.compile(rf"([+-]?)({_WHOLE})?(\.[0-9]+)?")
_FRACTION = re.compile(r"([+-]?)(?:([0-9]+)/([0-9]+)|\\[dt]?frac(?:\{([0-9]+)\}\{([0-9]+)\}|([0-9])([0-9])))")
_MATHS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))


def answer_in(message: str) -> str | None:
    r"""The answer of a message, without spaces and dollars around it; None in any other form.

    The last line is `Answer: X` and no other line is, or the message has one `\boxed{X}`; X may itself be in that box.
    What a model thinks before `</think>` is no part of it.
    """
    message = message.rpartition("</think>")[2]
    lines = [line.strip() for line in message.strip().splitlines()]
    said = [line.removeprefix(_SAID) for line in lines if line.startswith(_SAID)]
    boxes = _boxes(message)
    if len(said) + len(boxes) == 1:
        return plain((said or boxes)[0]) if not said or lines[-1].startswith(_SAID) else None
    whole = len(said) == len(boxes) == 1 and lines[-1].startswith(_SAID)
    return plain(boxes[0]) if whole and plain(said[0]) == rf"\boxed{{{boxes[0]}}}" else None


def printed(ran: Ran) -> str | None:
    """The answer that a program has printed: all of its output is one line. None if it ended in any other way."""
    return plain(ran.stdout) if ran.ok and not ran.cut else None


def plain(text: str) -> str | None:
    """An answer without a full stop, spaces and dollars around it; None of nothing, of lines, of what is too long."""
    text = text.strip().removesuffix(".").strip()
    for opens, closes in _MATHS:
        if text.startswith(opens) and text.endswith(closes) and len(text) > len(opens + closes):
            text = text[len(opens) : -len(closes)].strip()
            break
    return text if text and len(text) <= MOST and "\n" not in text else None


def number(text: str | None, *, worked_out: bool = True) -> Fraction | None:
    r"""The value of 42, -1,234, 0.5, 3/7 or \frac{3}{7}; None of any other text.

    `worked_out` takes fractions in lowest terms only: 12/4 is a task and no answer.
    """
    if text is None:
        return None
    if found := _FRACTION.fullmatch(re.sub(r"^(\\[dt]?frac\{)-", r"-\1", text)):
        sign, *terms = [part for part in found.groups() if part is not None]
        above, below = map(int, terms)
        lowest = below > 1 and math.gcd(above, below) == 1
        return Fraction(above, below) * (-1 if sign == "-" else 1) if below and (lowest or not worked_out) else None
    found = _DECIMAL.fullmatch(text)
    if found is None or not (found[2] or found[3]):
        return None
    return Fraction(found[1] + re.sub(r"[,{}]", "", found[2] or "0") + (found[3] or ""))


def agree(message: str, ran: Ran) -> bool:
    """Whether a message and a program have the same answer, as a number or as written."""
    said, found = answer_in(message), printed(ran)
    if said is None or found is None:
        return False
    values = number(said), number(found)
    return values[0] == values[1] if None not in values else said == found


def _boxes(message: str) -> list[str]:
    r"""What is in each \boxed{...}; braces in it are balanced."""
    found = []
    for part in message.split(r"\boxed{")[1:]:
        depth = 1
        for at, character in enumerate(part):
            depth += {"{": 1, "}": -1}.get(character, 0)
            if not depth:
                found.append(part[:at])
                break
        else:
            found.append("")  # never closed: a box all the same
    return found
