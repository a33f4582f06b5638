"""What a user has to choose from, counted: commands, their forms, flags and settings. None may grow unnoticed."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import msgspec

from cotune.cli.main import COMMANDS, parser
from cotune.config.policy import PolicyConfig
from cotune.config.prompts import SearchSettings
from cotune.config.train import TrainConfig

LIMITS = {"commands": 16, "forms": 28, "flags": 230, "settings": 103}
"""Lower a limit when you remove something. Raise one only for a use that the documentation shows."""

REPEATED = (
    "model", "tool_format", "recipe", "rewards", "loss", "lora", "lr", "schedule", "teacher",
    "k", "temperature", "select",
)  # fmt: skip
"""Fields of [[policy]] that repeat a setting of the run for one policy. They count once, with the run."""


def forms_of(command: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parsers of a command that have no forms below them: `cotune records list`, `cotune train`."""
    subcommands = [action for action in command._actions if isinstance(action, argparse._SubParsersAction)]
    if not subcommands:
        yield command
    for action in subcommands:
        for below in action.choices.values():
            yield from forms_of(below)


def flags_of(form: argparse.ArgumentParser) -> list[str]:
    """The options of a form without its help. Positional arguments are not flags."""
    options = [action for action in form._actions if action.option_strings]
    return [action.option_strings[0] for action in options if action.dest not in ("help", "help_all")]


def leaves(table: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    """The dotted names of the values in a table of a configuration."""
    for field in msgspec.structs.fields(table):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from leaves(field.type, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def run_settings() -> list[str]:
    """The settings of a run without [[policy]], whose tables are counted by themselves."""
    return [name for name in leaves(TrainConfig) if name != "policy"]


def policy_settings() -> list[str]:
    """The fields of [[policy]] that set nothing that the run can set for all policies."""
    return [name for name in leaves(PolicyConfig) if name.partition(".")[0] not in REPEATED]


def counts() -> dict[str, int]:
    forms = list(forms_of(parser()))
    searches = [f"prompts.{name}" for name in leaves(SearchSettings)]
    settings = [*run_settings(), *policy_settings(), *searches]
    return {
        "commands": sum(len(group) for group in COMMANDS.values()),
        "forms": len(forms),
        "flags": sum(len(flags_of(form)) for form in forms),
        "settings": len(settings),
    }


def test_commands_flags_and_settings_stay_few() -> None:
    found = counts()
    above = [name for name, limit in LIMITS.items() if found[name] > limit]
    assert not above, f"too many {' and '.join(above)}: {found}, limits: {LIMITS}"


def test_every_flag_has_a_line_of_help() -> None:
    for form in forms_of(parser()):
        for action in form._actions:
            if action.dest not in ("help", "help_all"):
                assert action.help and action.help != argparse.SUPPRESS, (form.prog, action.dest)
