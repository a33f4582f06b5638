"""Shared by the commands: the parts of their parsers, flags that set fields of a configuration, NAME=VALUE flags."""

from __future__ import annotations

import argparse
import ast
import atexit
import inspect
import os
import shutil
import sys
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from datetime import date, time
from functools import cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args, get_origin

import msgspec

from cotune.errors import ConfigError
from cotune.near_names import did_you_mean, near_names
from cotune.terminal import tell

APP = "MODULE:ATTRIBUTE or FILE.py:ATTRIBUTE of a @cotune.workflow"
TASKS = "JSON-lines file: one task per line"
RECORDS = "run folder, records file, or postgresql://..."
_NARROWEST = 20
"""Minimum width of help, in columns. A narrower terminal breaks the lines."""
_WIDEST = 100
"""Maximum width of help, in columns."""
_FLAGS = {
    "plan.kind": ("--plan", None),
    **dict.fromkeys(("plan.k", "k"), ("-k", "K")),
    "learner.lr": ("--lr", "LR"),
    "redact": ("--redact", "MODULE:FUNCTION"),
    "roles_by": ("--roles-by", "WHO"),
    **dict.fromkeys(("prompts_file", "prompts"), ("--prompts", "FILE")),
    "cluster.address": ("--cluster", "ADDRESS"),
    "evaluation.tasks": ("--eval-tasks", "FILE"),
    "init": ("--init", "RUN"),
    **dict.fromkeys(("records.path", "records"), ("--records", "RUN")),
    "episode": ("--episode", "ID"),
    "answer": ("--answer", "TEXT"),
    "timeout": ("--timeout", "SECONDS"),
    "out": ("--out", "DIR"),
    "otlp": ("--otlp", "URL"),
}
"""The flag of a field and the name of its value, for fields whose flag does not have the name of the field."""


def width() -> int:
    """The width of help: the terminal's, or COLUMNS, between `_NARROWEST` and `_WIDEST`."""
    return max(_NARROWEST, min(_WIDEST, shutil.get_terminal_size().columns) - 2)


class Formatter(argparse.HelpFormatter):
    """Fills the paragraphs of a description, and leaves its indented lines as they are."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=width())

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = text.splitlines()
        return "\n".join(line if line.startswith(" ") else wrap_paragraph(line, width) for line in lines)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrap_paragraph(" ".join(text.split()), width).splitlines()


def wrap_paragraph(text: str, width: int, first: str = "", rest: str = "") -> str:
    """A paragraph, wrapped. The first line begins with `first`, the others with `rest`. Paths and flags stay whole."""
    return textwrap.fill(
        text, width, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False, break_long_words=False
    )


def parser_texts(text: str, example: str) -> dict[str, Any]:
    """Arguments for a command's parser: one line of help, and an example that `--help` shows."""
    return {"description": f"{text}.\n\nExample:\n  {example}", "formatter_class": Formatter}


class Parser(argparse.ArgumentParser):
    """The parser of a command."""

    def __init__(self, *args: Any, **options: Any) -> None:
        # No abbreviations: a new flag could change their meaning, and a misspelt flag may cost money.
        super().__init__(*args, **{**options, "allow_abbrev": False})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments. For a flag that this command does not have, exit with status 2 and name similar ones."""
        has_subcommands = any(isinstance(action, argparse._SubParsersAction) for action in self._actions)
        if args is not None and not has_subcommands:  # the parser of the subcommand checks its flags
            flags = list(self._option_string_actions)
            for word in args:
                if word == "--":  # only positional arguments follow
                    break
                flag = word.partition("=")[0]
                if flag.startswith("--") and flag not in flags:
                    remedy = did_you_mean(near_names(flag, flags)) or "--help lists the flags."
                    self.error(f"{flag} is not a flag of this command. {remedy}")
        return super().parse_known_args(args, namespace)


def add_trust_folder(command: Any, folder: str) -> None:
    """Add `--trust-folder` to a command that runs code named in a folder."""
    command.add_argument(
        "--trust-folder",
        action="store_true",
        help=f"trust {folder}, although you did not make it on this machine: run the application and functions that it "
        "names, and use its addresses. Without this flag you are asked in a terminal, and a script stops with an error",
    )


def add_repeated(command: Any, flag: str, metavar: str, text: str, **more: Any) -> None:
    """Add a flag that may be repeated. Its values are a list, empty without the flag."""
    command.add_argument(flag, action="append", default=[], metavar=metavar, help=f"{text}; repeatable", **more)


def add_moved(command: Any, whose: str) -> None:
    """Add `--model` of a command that opens a run or an export whose base models may have moved."""
    text = f"base model, if it is not where the {whose} says; OLD=NEW if there are several"
    add_repeated(command, "--model", "BASE", text)


def add_use(command: Any, other: str) -> None:
    """Add `--use` of a command that combines policies of several runs, instead of `other`."""
    text = (
        f"instead of {other}: the source of a role's policy (without ROLE= of all other roles): a run (RUN#STEP: one "
        "of its checkpoints), an export, or an untrained model"
    )
    add_repeated(command, "--use", "ROLE=SOURCE", text)


def add_prompts(command: Any, default: str) -> None:
    """Add `--prompts` and `--any-prompts` of a command that uses weights with edited prompts."""
    command.add_argument(
        "--prompts", metavar="FILE", help=f"prompts.json, or a folder that has one (default: {default})"
    )
    text = "allow other prompts than the weights were trained with"
    command.add_argument("--any-prompts", action="store_true", help=text)


def parse_moved_models(texts: Sequence[str]) -> str | dict[str, str] | None:
    """The values of `--model`: the new path of the only base model, or new paths by old paths. Raises ConfigError."""
    if len(texts) == 1 and "=" not in texts[0]:
        return texts[0]
    return parse_pairs("--model", texts, "OLD=NEW", "For example: --model Qwen3-1.7B=models/qwen") or None


def add_address(command: Any, port: int) -> None:
    """Add `--host`, `--port` (default: `port`) and `--token` of a command that listens."""
    command.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: %(default)s); any other than loopback needs a token",
    )
    command.add_argument("--port", type=int, default=port, help="0 takes a free port (default: %(default)s)")
    command.add_argument(
        "--token", help="bearer token that clients must send (default: the environment variable COTUNE_TOKEN)"
    )


def add_records(command: Any, default: str | None = None) -> None:
    """Add `--records` and `--app` of a server that records."""
    text = "record calls here: a run folder, a records file, or the address of cotune collect"
    if default:
        text += f" (default: {default})"
    command.add_argument("--records", default=default, metavar="ADDRESS", help=text)
    text = "name of the application in the records of a collector (default: COTUNE_APP)"
    command.add_argument("--app", default="", metavar="NAME", help=text)


def add_fields(command: Any, *names: str, table: type[msgspec.Struct] | None = None, **texts: str) -> None:
    """Add flags for these fields of `table` (default: a run's configuration), with the field's type, choices, default
    and help.

    The help is the documentation of the field in `table`, or else in a run's configuration. `texts` replace it.
    """
    from cotune.config.train import TrainConfig

    for name in names:
        field = _find_field(table or TrainConfig, name)
        if name in texts:
            text = texts[name]
        else:
            text = _help_text(field.documentation or _find_field(TrainConfig, name).documentation, field.default)
        last_part = name.rpartition(".")[2]
        flag, metavar = _FLAGS.get(name, (f"--{last_part.replace('_', '-')}", None))
        command.add_argument(flag, dest=name, help=text, **_argument_options(field.type, metavar, last_part))
    # A command may add fields of several tables: `fields_of` reads all of them.
    earlier_fields = command.get_default("fields") or ()
    command.set_defaults(fields=(*earlier_fields, *names))


def _help_text(documentation: str, default: Any) -> str:
    """The documentation of a field as the help of a flag: without a capital and a full stop, with the default."""
    text = documentation.rstrip(".")
    if not text[1:2].isupper():  # an acronym stays as it is
        text = f"{text[:1].lower()}{text[1:]}"
    if default is not False and default not in (None, "", (), msgspec.NODEFAULT):
        text += f" (default: {default})"
    return text


def _argument_options(kind: Any, metavar: str | None, name: str) -> dict[str, Any]:
    """The options of argparse's `add_argument` for a field of the type `kind`, so that flags need no declaration of
    their own.

    A tuple may be given several times, a Literal has choices, and an optional type counts as the type itself. `metavar`
    names the value in the help text; by default, N for integers, X for numbers, else the field's `name`.
    """
    if kind is bool:
        return {"action": "store_true", "default": None}
    options: dict[str, Any] = {"action": "append" if get_origin(kind) is tuple else "store"}
    # The type itself, or the members of a union such as `int | None`.
    for part in (kind, *get_args(kind)):
        if part in (int, float):
            options["type"] = part
            options["metavar"] = metavar or ("N" if part is int else "X")
            return options
        if get_origin(part) is Literal:
            options["choices"] = get_args(part)
            return options
    options["metavar"] = metavar or name.upper()
    return options


class _Field(NamedTuple):
    """A field of a configuration class."""

    type: Any
    default: Any
    documentation: str


def _find_field(table: type[msgspec.Struct], name: str) -> _Field:
    """A field by its dotted name: `plan.k` is the field `k` of the class of the field `plan`."""
    first, _, further = name.partition(".")
    field = next(field for field in msgspec.structs.fields(table) if field.name == first)
    if further:
        return _find_field(field.type, further)
    return _Field(field.type, field.default, field_documentation(table).get(first, ""))


@cache
def field_documentation(table: type[msgspec.Struct]) -> Mapping[str, str]:
    """The text below each field of a class, on one line, by the name of the field."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(table))).body
    assert isinstance(definition, ast.ClassDef)
    texts: dict[str, str] = {}
    for base in table.__bases__:
        if base is not msgspec.Struct:
            texts.update(field_documentation(base))
    # A documented field is a line `name: type = default` with a text as the statement below.
    for field, below in pairwise(definition.body):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            texts[ast.unparse(field.target)] = " ".join(str(below.value.value).split())
    return texts


def fields_of(a: argparse.Namespace, table: type[msgspec.Struct] | None = None) -> dict[str, Any]:
    """The fields that the command line sets, by their dotted names. With `table`, only fields of this class."""
    values: dict[str, Any] = {}
    for name in a.fields:
        value = getattr(a, name)
        if value is not None and (table is None or name in table.__struct_fields__):
            values[name] = value
    return values


@contextmanager
def printing_aside() -> Iterator[None]:
    """Send standard output to standard error inside this context, for this process and its children.

    An application that runs inside this context may also print when the process exits. From then on, all output goes to
    standard error.
    """
    sys.stdout.flush()
    try:
        # Child processes write to descriptor 1, whatever `sys.stdout` is.
        stdout = os.dup(1)
        os.dup2(2, 1)
    except OSError:
        stdout = None  # a process without these descriptors
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        if stdout is not None:
            os.dup2(stdout, 1)
            os.close(stdout)
        atexit.register(_print_to_stderr)


def _print_to_stderr() -> None:
    """Send all later output of `print` to standard error."""
    sys.stdout.flush()
    sys.stdout = sys.stderr


def tell_left_out(left_out: Mapping[str, int]) -> None:
    """Print the counts of left-out records by reason."""
    if left_out:
        tell("left out: " + ", ".join(f"{count} {reason}" for reason, count in sorted(left_out.items())))


def parse_pairs(flag: str, texts: Sequence[str], form: str = "NAME=VALUE", hint: str = "") -> dict[str, str]:
    """The values of a repeatable flag by name. If a name is repeated, its last value counts. Raises ConfigError."""
    values: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(flag, text, f"must be {form}", hint)
        values[name] = value
    return values


def parse_prices(texts: Sequence[str]) -> dict[str, tuple[float, float]]:
    """The values of `--price MODEL=PROMPT/COMPLETION`. Raises ConfigError."""
    form = "MODEL=PROMPT/COMPLETION, in money per million tokens"
    values: dict[str, tuple[float, float]] = {}
    for name, text in parse_pairs("--price", texts, form, "For example: --price gpt-4o-mini=0.15/0.60").items():
        prompt, slash, completion = text.partition("/")
        if not slash:  # one price for all tokens
            completion = prompt
        try:
            values[name] = (float(prompt), float(completion))
        except ValueError:
            raise ConfigError("--price", f"{name}={text}", f"must be {form}") from None
    return values


def parse_settings(texts: Sequence[str]) -> dict[str, Any]:
    """The values of `--set FIELD=VALUE`, read as TOML, or as text if they are not TOML. Raises ConfigError."""
    values: dict[str, Any] = {}
    for name, text in parse_pairs("--set", texts, "FIELD=VALUE", "For example: --set lora.rank=8").items():
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        # No field is a date. A day such as 2026-11-30 (records.since) is text.
        values[name] = text if isinstance(value, date | time) else value
    return values
