"""What is printed for people: text of applications and models is shown, never obeyed by the terminal."""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

_PIPED = 200
"""Columns of what is not printed on a terminal."""
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def harmless(text: str) -> str:
    """`text` with a visible mark in place of each control character that a terminal acts on, but line ends and tabs."""
    return _CONTROLS.sub(lambda found: chr(0x2400 + ord(found[0])) if ord(found[0]) < 0x20 else "�", text)


def tell(text: str) -> None:
    """Print a line at once."""
    print(harmless(text), flush=True)


def suggest(*commands: str) -> None:
    """Print the commands to go on with, the usual one first, where a person reads along: not into a pipe."""
    if sys.stdout.isatty():
        for lead, command in zip(("next:", *("  or:" for _ in commands)), commands, strict=False):
            tell(f"{lead} {command}")


def agrees(question: str, *, unsaid: bool) -> bool:
    """Whether the person at the terminal says yes; an empty line is `unsaid`, and the end of the input a no."""
    try:
        reply = input(question).strip().lower()
    except EOFError:
        tell("\nno answer, which is taken as no")
        return False
    return reply in ("y", "yes") or (unsaid and not reply.startswith("n"))


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Show what is being done, each text in place of the last, where standard error is a terminal."""
    shown = sys.stderr.isatty()

    def say(text: str) -> None:
        if shown:
            print(f"\r\x1b[2K{harmless(text)}", end="", file=sys.stderr, flush=True)

    try:
        yield say
    finally:
        say("")


def terminal(**options: Any) -> Console:
    """A console that takes text as it is: no markup in it, and no escape sequence. `options` are those of `Console`.

    Into a pipe or file it prints wide lines, so that tables stay tables there; COLUMNS says otherwise."""
    console = _terminal_class()(markup=False, **options)
    if not (console.is_terminal or "width" in options or "COLUMNS" in os.environ):
        console.width = _PIPED
    return console


@functools.cache
def _terminal_class() -> type[Console]:
    from rich.console import Console
    from rich.segment import Segment

    class Terminal(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                if segment.control or not _CONTROLS.search(segment.text):
                    yield segment
                else:
                    yield Segment(harmless(segment.text), segment.style)

        def _render_buffer(self, buffer: Iterable[Segment]) -> str:
            """Tables fill their lines with spaces up to the widest cell: in a pipe or file nobody wants them."""
            text = super()._render_buffer(buffer)
            return text if self.is_terminal else re.sub(r"[ \t]+(?=\n)", "", text)

    return Terminal


class LogFormat(logging.Formatter):
    """`logger: message`, harmless."""

    def __init__(self) -> None:
        super().__init__("%(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return harmless(super().format(record))
