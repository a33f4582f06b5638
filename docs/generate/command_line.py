"""The commands, from the parsers that read them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from textwrap import dedent

from wording import entry, prose, small

from cotune.cli.main import parser


def commands() -> str:
    """Every command: what it does, an example, and each of its arguments and flags."""
    return "\n\n".join(_command(name, command) for name, command in _below(parser()))


def _below(command: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """The commands of a command, by the words that call them."""
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                ways = list(_below(below))
                yield from ([(f"{name} {way}", found) for way, found in ways] if ways else [(name, below)])


def _command(name: str, command: argparse.ArgumentParser) -> str:
    said, _, example = (command.description or "").partition("\n\nExample:\n")
    shown = f"```sh\n{dedent(example).strip()}\n```\n\n" if example else ""
    extra = command.get_default("extra")
    only = command.get_default("extra_for")
    needs = f"{f'With `{only}` it' if only else 'It'} needs the extra `{extra}`: `pip install -e '.[{extra}]'`.\n\n"
    rows = [_argument(command, action) for action in command._actions if action.dest not in ("help", "help_all")]
    return f"### cotune {name}\n\n{prose(said)}\n\n{needs if extra else ''}{shown}" + "\n".join(rows)


def _argument(command: argparse.ArgumentParser, action: argparse.Action) -> str:
    formatter = command._get_formatter()
    term = formatter._format_action_invocation(action)
    marks = [
        "required" if action.required and action.option_strings else "",
        "may be given several times" if isinstance(action, argparse._AppendAction) else "",
    ]
    return entry(term, small(", ".join(filter(None, marks))), prose(formatter._expand_help(action)))
