"""Flags that set fields of a configuration: their type, choices, default and help are the field's own."""

from __future__ import annotations

import argparse
import ast
import inspect
import textwrap
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, get_args, get_origin

import msgspec

RUN = (
    "model", "policies", "plan.kind", "plan.k", "plan.select", "recipe", "steps", "tasks_per_step", "concurrency",
    "learner.lr", "sampling.max_tokens", "seed", "on_failure", "redact", "roles_by", "mode", "cluster.address",
    "evaluation.tasks", "init", "loggers", "profile", "records.path", "records.min_reward", "records.best_of",
)  # fmt: skip
"""Fields of a run that have flags."""
_FLAGS = {
    "plan.kind": ("--plan", None),
    **dict.fromkeys(("plan.k", "k"), ("-k", "K")),
    "learner.lr": ("--lr", "LR"),
    "on_failure": ("--on-failure", "HOW"),
    "redact": ("--redact", "MODULE:FUNCTION"),
    "roles_by": ("--roles-by", "WHO"),
    "cluster.address": ("--cluster", "ADDRESS"),
    "evaluation.tasks": ("--eval-tasks", "FILE"),
    "init": ("--init", "RUN"),
    "loggers": ("--logger", None),
    "profile": ("--profile", "STEP"),
    **dict.fromkeys(("records.path", "records"), ("--records", "RUN")),
    "episode": ("--episode", "ID"),
    "answer": ("--answer", "TEXT"),
    "timeout": ("--timeout", "SECONDS"),
    "out": ("--out", "DIR"),
    "otlp": ("--otlp", "URL"),
}
"""By field, its flag and what stands for its value, where these are not the field's own name."""


def add_fields(command: Any, *names: str, table: type[msgspec.Struct] | None = None, **texts: str) -> None:
    """Add the flags of these fields of `table` (default: a run's configuration), which also documents those that
    `table` does not; `texts` replace the help of some."""
    from cotune.trainer.config.train import TrainConfig

    for name in names:
        kind, default, text = _field(table or TrainConfig, name)
        text = text or _field(TrainConfig, name)[2]
        own = name.rpartition(".")[2]
        flag, stands_for = _FLAGS.get(name) or (f"--{own.replace('_', '-')}", None)
        text = texts.get(name, text.rstrip(".") if text[1:2].isupper() else f"{text[:1].lower()}{text[1:]}".rstrip("."))
        unsaid = name in texts or default is False or default in (None, "", (), msgspec.NODEFAULT)
        text += "" if unsaid else f" (default: {default})"
        command.add_argument(flag, dest=name, help=text, **_reading(kind, stands_for, own))
    command.set_defaults(fields=names)


def _reading(kind: Any, stands_for: str | None, name: str) -> dict[str, Any]:
    """How argparse reads a field of this type."""
    if kind is bool:
        return {"action": "store_true", "default": None}
    parts = (kind, *get_args(kind))
    number = next((part for part in parts if part in (int, float)), None)
    choices = next((get_args(part) for part in parts if get_origin(part) is Literal), None)
    return {
        "action": "append" if get_origin(kind) is tuple else "store",
        "type": number,
        "choices": choices,
        "metavar": None if choices else stands_for or {int: "N", float: "X", None: name.upper()}[number],
    }


def given(a: argparse.Namespace) -> dict[str, Any]:
    """The fields that the command line names, by their dotted names."""
    return {name: value for name in a.fields if (value := getattr(a, name)) is not None}


def _field(table: type[msgspec.Struct], name: str) -> tuple[Any, Any, str]:
    """Type, default and documentation of a field by its dotted name."""
    first, _, rest = name.partition(".")
    field = next(field for field in msgspec.structs.fields(table) if field.name == first)
    return _field(field.type, rest) if rest else (field.type, field.default, documentation(table).get(first, ""))


@cache
def documentation(table: type[msgspec.Struct]) -> Mapping[str, str]:
    """The text below each field of a class, on one line."""
    (made,) = ast.parse(textwrap.dedent(inspect.getsource(table))).body
    assert isinstance(made, ast.ClassDef)
    bases = [documentation(base) for base in table.__bases__ if base is not msgspec.Struct]
    found = {name: text for base in bases for name, text in base.items()}
    for line, below in zip(made.body, made.body[1:], strict=False):
        if isinstance(line, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            found[ast.unparse(line.target)] = " ".join(str(below.value.value).split())
    return found
