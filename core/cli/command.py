"""What the commands of the command line share: how one is added, the texts of their arguments, NAME=VALUE flags."""

from __future__ import annotations

import argparse
import atexit
import os
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

from cotune.errors import ConfigError

APP = "MODULE:ATTRIBUTE or FILE.py:ATTRIBUTE of a @cotune.workflow"
TASKS = "JSON-lines file: one task per line"
RECORDS = "run folder or records file"


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Help with room for long flags."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=110)


def add_command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    text: str,
    example: str,
    *,
    extra: str | None = None,
) -> Any:
    """Add a command to `commands`, what `add_subparsers` returned; its parser, to add arguments to.

    Args:
        run: does the command and returns the exit status.
        text: one line of help, without a capital or a full stop.
        example: a command line, shown by `--help`.
        extra: the extra of cotune that brings the packages it needs, where the base install does not.
    """
    command = commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.\n\nExample:\n  {example}",
        formatter_class=Formatter,
    )
    command.set_defaults(run=run, extra=extra)
    return command


def add_trust(command: Any) -> None:
    """Add `--trust-remote-code` of a command that loads models."""
    command.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run code that the model folder brings along (auto_map), which may do anything; refused without",
    )


def add_repeated(command: Any, flag: str, stands_for: str, text: str, **more: Any) -> None:
    """Add a flag that may be given several times; its values are a list, empty without any."""
    command.add_argument(flag, action="append", default=[], metavar=stands_for, help=f"{text}; repeatable", **more)


def add_address(command: Any, port: int) -> None:
    """Add `--host`, `--port` (default: `port`) and `--token` of a command that listens."""
    command.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: %(default)s); any other than loopback needs a token",
    )
    command.add_argument("--port", type=int, default=port, help="0 takes a free one (default: %(default)s)")
    command.add_argument("--token", help="bearer token that clients must send (or the environment's COTUNE_TOKEN)")


@contextmanager
def printing_aside() -> Iterator[None]:
    """Send to standard error what is printed to standard output in here, by other processes and at the exit too."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
        os.dup2(2, 1)
    except OSError:
        kept = None
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        if kept is not None:
            os.dup2(kept, 1)
            os.close(kept)
        atexit.register(_aside)


def _aside() -> None:
    sys.stdout.flush()
    sys.stdout = sys.stderr


def pairs(flag: str, given: Sequence[str], form: str = "NAME=VALUE", hint: str = "") -> dict[str, str]:
    """What a repeatable flag was given, by name; of a name given twice, the last. Raises ConfigError."""
    found = {}
    for pair in given:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(flag, pair, f"must be {form}", hint)
        found[name] = value
    return found


def prices(given: Sequence[str]) -> dict[str, tuple[float, float]]:
    """What `--price MODEL=PROMPT/COMPLETION` was given. Raises ConfigError."""
    form = "MODEL=PROMPT/COMPLETION, in money per million tokens"
    found: dict[str, tuple[float, float]] = {}
    for name, text in pairs("--price", given, form, "For example: --price gpt-4o-mini=0.15/0.60").items():
        prompt, slash, completion = text.partition("/")
        try:
            found[name] = (float(prompt), float(completion if slash else prompt))
        except ValueError:
            raise ConfigError("--price", f"{name}={text}", f"must be {form}") from None
    return found


def settings(given: Sequence[str]) -> dict[str, Any]:
    """What `--set FIELD=VALUE` was given; values are TOML, or else text. Raises ConfigError."""
    found = pairs("--set", given, "FIELD=VALUE", "For example: --set lora.rank=8")
    return {name: _toml(value) for name, value in found.items()}


def _toml(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
