"""The fields of a run's configuration, from the classes that read it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

import msgspec
from wording import entry, prose, small

from cotune.algorithms.recipes import Attribution, Filters, LossSpec
from cotune.cli.command import field_documentation
from cotune.config.policy import EvaluationSampling, PolicyConfig
from cotune.config.prompts import SearchSettings
from cotune.config.train import TrainConfig
from cotune.errors import ConfigError
from cotune.trainer.config.load import convert

REQUIRED = ("model",)
"""Fields that a run needs although the tree has a default for them, for records that belong to no run."""
BAD: dict[type, Any] = {int: -1, float: -1.0, str: "?"}
"""By type a value that a field with bounds refuses; what it says then is what it allows."""


def fields() -> str:
    """Every field by table: name, type, default, what is allowed, text."""
    tables = {f.encode_name: f.type for f in msgspec.structs.fields(TrainConfig) if _is_table(f.type)}
    parts = ["### Without a table", *_entries(TrainConfig, "")]
    for name, table in {**tables, "policy": PolicyConfig, "policy.evaluation": EvaluationSampling}.items():
        title = "[[policy]]" if name == "policy" else f"[{name}]"
        said = (table.__doc__ or "").partition(title)[2].strip()
        parts += [f"### {title} {{#{name}}}", prose(said), *_entries(table, f"{name}.")]
    return "\n\n".join(parts)


def search_fields() -> str:
    """Every option of a search for prompts."""
    said = prose(SearchSettings.__doc__ or "")
    return "\n\n".join([said, *_entries(SearchSettings, "prompts.")])


def method_attributes() -> str:
    """The attributes of a method's rewards, filters and loss, each with its default."""
    parts = []
    for table in (Attribution, Filters, LossSpec):
        said = "\n\n".join(prose(part) for part in (table.__doc__ or "").split("\n\n"))
        rows = [f"- `{field.encode_name}`: {small(_typed(field))}" for field in msgspec.structs.fields(table)]
        parts += [f"### {table.__name__}", said, "\n".join(rows)]
    return "\n\n".join(parts)


def _entries(table: type[msgspec.Struct], prefix: str) -> Iterator[str]:
    texts = field_documentation(table)
    needed = [field for field in msgspec.structs.fields(table) if field.required or prefix + field.name in REQUIRED]
    others = [field for field in msgspec.structs.fields(table) if field not in needed]
    for field in [*needed, *others]:
        if _is_table(field.type):
            continue
        dotted = prefix + field.encode_name
        allowed = _allowed(dotted, field.type)
        text = prose(texts[field.name]) + (f" Allowed: {prose(allowed)}." if allowed else "")
        typed = f"{_kind(field.type)}, required" if dotted in REQUIRED else _typed(field)
        yield entry(dotted, small(typed), text)


def _is_table(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _typed(field: msgspec.structs.FieldInfo) -> str:
    """Type and default of a field."""
    if field.required:
        return f"{_kind(field.type)}, required"
    value = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    return f"{_kind(field.type)}, default {'none' if value is None else json.dumps(value)}"


def _kind(kind: Any) -> str:
    """A type as TOML has it: the values of a choice, else number, text, list and so on."""
    if get_origin(kind) is Literal:
        return " | ".join(json.dumps(choice) for choice in get_args(kind))
    if kind is type(None):
        return ""
    if (args := get_args(kind)) and get_origin(kind) not in (tuple, dict, Mapping):
        return " | ".join(filter(None, (_kind(part) for part in args)))
    if get_origin(kind) is tuple:
        return f"list of {_kind(args[0])}" if args[-1] is Ellipsis else f"list of {len(args)}, each {_kind(args[0])}"
    plain = {int: "integer", float: "number", str: "text", bool: "true or false"}
    return plain.get(kind, "tables" if _is_table(kind) else "table")


def _allowed(dotted: str, kind: Any) -> str:
    """What the field says that it allows when it gets a value that makes no sense; "" where it takes any."""
    parts = (kind,) if get_origin(kind) in (tuple, dict, Mapping) else (kind, *get_args(kind))
    bad = next((BAD[part] for part in parts if part in BAD), None)
    if bad is None or dotted == "model":
        return ""
    *parents, leaf = dotted.split(".")
    table: dict[str, Any] = {leaf: bad}
    for parent in reversed(parents):
        table = {parent: table}
    try:
        convert({"model": "m", **table})
    except ConfigError as error:
        return error.fault.removeprefix("must be ").removeprefix("is not ") if error.field == dotted else ""
    return ""
