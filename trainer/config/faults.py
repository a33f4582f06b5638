"""Errors of a configuration that cannot be read: they name the field, its value, and the place where it belongs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

import msgspec

from cotune.errors import ConfigError, expectation_clause, field_and_fault
from cotune.near_names import did_you_mean, near_names
from cotune.trainer.config.removed import removed_setting

PAGE = "See docs/reference/configuration.md."
TRUNCATIONS = ("top_p", "top_k", "min_p")
"""Parameters of a request that cut off unlikely tokens."""
_ARGUMENTS = {
    "workflow": "the first argument of cotune.train and cotune train",
    "tasks": "the argument tasks of cotune.train, --tasks of cotune train",
    **dict.fromkeys(("out", "run"), "the argument run of cotune.train, --out of cotune train"),
    "config": "the argument config of cotune.train, --config of cotune train",
    "console": "an argument of cotune.train",
    **dict.fromkeys(("limit", "calls"), "a field of CheckLimits, the argument limits of cotune.check"),
}
"""Arguments that are no settings, by the name under which a user may look for them in the configuration."""


def conversion_error(
    error: msgspec.ValidationError, table: Mapping[str, Any], kind: type[msgspec.Struct]
) -> ConfigError:
    """The error, with its remedy, for a `table` that msgspec could not convert to the struct `kind`."""
    # The check of a struct has raised it, and it names the fix already.
    if isinstance(error.__cause__, ConfigError):
        return error.__cause__
    field, fault = field_and_fault(error)
    value = _value_at(table, field or "config")
    if fault.startswith("Invalid enum value"):
        return ConfigError(field or "config", value, f"is not one of {', '.join(_field_choices(field, kind))}", PAGE)

    # In an earlier version, this field may have been a table with settings.
    value_of_field = _value_at(table, field)
    if isinstance(value_of_field, Mapping):
        for name in value_of_field:
            removed = removed_setting(f"{field}.{name}", value_of_field[name])
            if removed is not None:
                return removed
    expectation = expectation_clause(fault)
    remedy = PAGE
    if expectation.startswith("must be a table, not") and field in kind.__struct_fields__:
        remedy = " ".join([*_fields_sentence(field, kind), PAGE])
    return ConfigError(field or "config", value, expectation, remedy)


def check_names(table: Mapping[str, Any], kind: type[msgspec.Struct]) -> None:
    """Raise ConfigError for a name in `table`, or in a table inside it, that is no field of the struct `kind`."""
    for path in _unknown_names(table, kind):
        raise unknown_field(path, table, kind)


def _unknown_names(table: Mapping[str, Any], kind: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names that are no fields; in a list of tables with an index, such as `policy[0].lr`."""
    types = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    for name, value in table.items():
        path = f"{prefix}{name}"
        if name not in types:
            yield path
            continue
        struct = _struct_in(types[name])
        if struct is None:
            continue
        if isinstance(value, Mapping):
            yield from _unknown_names(value, struct, f"{path}.")
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                if isinstance(item, Mapping):
                    yield from _unknown_names(item, struct, f"{path}[{index}].")


def _struct_in(kind: Any) -> type[msgspec.Struct] | None:
    """The struct in the type of a field: the type itself, the items of a list, or one part of a union with None."""
    for part in (kind, *get_args(kind)):
        if isinstance(part, type) and issubclass(part, msgspec.Struct):
            return part
    return None


def unknown_field(field: str, table: Mapping[str, Any], kind: type[msgspec.Struct]) -> ConfigError:
    """The error for a name that is no field. Its remedy names the replacement of a removed setting, the table in which
    the name belongs, or similar names."""
    value = _value_at(table, field)
    name_without_indices = re.sub(r"\[[^]]*\]", "", field)  # policy[0].lr becomes policy.lr
    removed = removed_setting(name_without_indices, value)
    if removed is not None:
        return removed
    parent, _, name = name_without_indices.rpartition(".")
    if name in TRUNCATIONS and parent in ("", "sampling", "policy"):
        message = "cannot be set for training: which tokens it cuts away depends on the weights that are trained"
        remedy = f"Set it for evaluations, in a [[policy]] table: evaluation = {{ {name} = {value} }}"
        return ConfigError(field, value, message, remedy)
    message = "is not a field of the configuration"
    is_dotted_key = field in table and "." in field  # {"lora.rank": 8} in place of {"lora": {"rank": 8}}
    if is_dotted_key:
        table_name, _, setting = field.partition(".")
        remedy = f"Here it is a table: {table_name} = {{{setting!r}: {table[field]!r}}}. {PAGE}"
        return ConfigError(field, table[field], message, remedy)
    return ConfigError(field, value, message, " ".join([*_other_place_hint(field, kind), PAGE]))


def _other_place_hint(field: str, kind: type[msgspec.Struct]) -> Iterator[str]:
    """A hint for a setting that does not exist: the table in which a setting of this name belongs, or settings with
    similar names. Yields at most one sentence."""
    if field in _ARGUMENTS:
        yield f"It is {_ARGUMENTS[field]}."
        return
    name = field.rpartition(".")[2]
    settings = list(_field_names(kind))
    same_name = [setting for setting in settings if setting.rpartition(".")[2] == name]
    if same_name:
        above = " (at the top of the file, above the first [table])" if name in same_name else ""
        yield f"It belongs elsewhere: {' or '.join(same_name)}{above}."
        return
    similar_names = _similar_fields(field, settings)
    if similar_names:
        yield did_you_mean(similar_names)


def _similar_fields(field: str, settings: Sequence[str]) -> list[str]:
    """At most three settings whose last name is almost the last name of `field`, those in the same table first."""
    table, _, name = field.lower().rpartition(".")
    last_names = {setting.rpartition(".")[2] for setting in settings}
    similar_names = near_names(name, last_names, cutoff=0.75)
    similar = [setting for setting in settings if setting.rpartition(".")[2] in similar_names]
    return sorted(similar, key=lambda setting: setting.rpartition(".")[0] != table)[:3]


def _fields_sentence(field: str, kind: type[msgspec.Struct]) -> Iterator[str]:
    """Yield a sentence with the fields of a table; nothing if the table has free names."""
    if names := [name for name in _field_names(kind) if name.startswith(f"{field}.")]:
        yield f"Its fields: {', '.join(names)}."


def _field_names(kind: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all fields of a configuration and its tables, without the fields of [[policy]]."""
    for field in msgspec.structs.fields(kind):
        yield prefix + field.name
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from _field_names(field.type, f"{prefix}{field.name}.")


def _value_at(table: Any, dotted: str) -> Any:
    """The value of a field by its dotted name, such as `policy[0].lr`; None if it is not in the table."""
    value = table
    for part in re.findall(r"[^.\[\]]+", dotted):
        if isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, Sequence) and part.isdigit():
            value = value[int(part)]
        else:
            value = None
    return value


def _field_choices(dotted: str, kind: Any) -> list[str]:
    """The allowed values of a field whose type is a Literal; none for other fields."""
    # Follow the dotted name through the tables to the type of the field.
    field_type = kind
    for part in re.findall(r"[a-z_]+", dotted):
        field_type = next(field.type for field in msgspec.structs.fields(field_type) if field.name == part)
        field_type = _struct_in(field_type) or field_type
    # The type is a Literal, or a union with one, such as Literal["a", "b"] | None.
    choices: list[str] = []
    for literal in (field_type, *get_args(field_type)):
        if get_origin(literal) is Literal:
            choices += [str(choice) for choice in get_args(literal)]
    return sorted(choices)
