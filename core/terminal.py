"""Output for people. Text of applications and models is shown, but the terminal never acts on it."""

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

_PIPED_WIDTH = 200
"""Width of output that does not go to a terminal, in columns."""
UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters, but line ends and tabs
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # direction of writing
    "\u00ad\u034f\u115f\u1160\u17b4\u17b5\u180e\u200b\u2060-\u2065\u206a-\u206f"  # no width
    "\u3164\ufeff\uffa0\ufff9-\ufffb"
    "\U000e0000-\U000e0fff]"  # tags and selectors, which can spell a text that nobody sees
    # Joiners have their use within emoji, and between letters of Arabic and Indic scripts.
    "|(?<![\u0600-\u08ff\u0900-\u0dff\u2600-\u27bf\ufe0f\U0001f000-\U0001faff])[\u200c\u200d]"
    "|[\u200c\u200d](?![\u0600-\u08ff\u0900-\u0dff\u2600-\u27bf\U0001f000-\U0001faff])"
)
"""Characters that a terminal acts on, or that are invisible."""


def harmless(text: str) -> str:
    """`text` with a visible mark in place of each character that a terminal acts on or that is invisible."""
    return UNSEEN.sub(lambda match: chr(0x2400 + ord(match[0])) if ord(match[0]) < 0x20 else "�", text)


def tell(text: str) -> None:
    """Print a line at once."""
    print(harmless(text), flush=True)


def print_line(console: Console, text: str) -> None:
    """Print a line on a console. In a file or pipe, it is not wrapped."""
    console.print(text, highlight=False, markup=False, soft_wrap=not console.is_terminal)


def suggest(*commands: str) -> None:
    """Print the commands to continue with, the usual one first. Prints nothing into a pipe."""
    if sys.stdout.isatty():
        for lead, command in zip(("next:", *("  or:" for _ in commands)), commands, strict=False):
            tell(f"{lead} {command}")


def ask_yes_no(question: str, *, default: bool) -> bool:
    """Ask the user at the terminal. An empty line means `default`, and the end of the input means no."""
    try:
        reply = input(question).strip().lower()
    except EOFError:
        tell("\nno answer, which is taken as no")
        return False
    return reply in ("y", "yes") or (default and not reply.startswith("n"))


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Show progress on standard error if it is a terminal. Each text replaces the previous one."""
    is_terminal = sys.stderr.isatty()

    def say(text: str) -> None:
        if is_terminal:
            print(f"\r\x1b[2K{harmless(text)}", end="", file=sys.stderr, flush=True)

    try:
        yield say
    finally:
        say("")


def terminal(**options: Any) -> Console:
    """A console that prints text without markup and escape sequences. `options` are options of `Console`.

    In a pipe or file it prints wide lines, so that tables stay tables, unless COLUMNS is set."""
    console = _terminal_class()(markup=False, **options)
    if not (console.is_terminal or "width" in options or "COLUMNS" in os.environ):
        console.width = _PIPED_WIDTH
    return console


@functools.cache
def _terminal_class() -> type[Console]:
    """The class of `terminal`. It is defined in a function so that rich is imported only when something is printed."""
    from rich.console import Console
    from rich.segment import Segment
    from rich.text import Text

    class Terminal(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(harmless(text), **options)

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            """Show control characters and invisible characters as visible marks, so that the terminal never acts on
            them."""
            # Texts: before rich breaks the lines, because a mark takes a column and an invisible character takes none.
            if isinstance(renderable, Text) and UNSEEN.search(renderable.plain):
                renderable = renderable.copy()
                renderable.plain = harmless(renderable.plain)
            # Other things that rich prints, such as titles of tables: only their finished segments are known here.
            # A control segment is rich's own, for example to move the cursor.
            for segment in super().render(renderable, options):
                if segment.control or not UNSEEN.search(segment.text):
                    yield segment
                else:
                    yield Segment(harmless(segment.text), segment.style)

        def _render_buffer(self, buffer: Iterable[Segment]) -> str:
            """Remove spaces at the ends of lines in a pipe or file: tables fill their lines up to the widest cell."""
            text = super()._render_buffer(buffer)
            return text if self.is_terminal else re.sub(r"[ \t]+(?=\n)", "", text)

    return Terminal


class LogFormat(logging.Formatter):
    """The form `logger: message`, made harmless."""

    def __init__(self) -> None:
        super().__init__("%(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return harmless(super().format(record))
