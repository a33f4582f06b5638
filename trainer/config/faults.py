"""What is wrong with a configuration that cannot be read: the field, its value, and where it belongs."""

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
"""What is given beside the configuration, by what it may be taken for."""


def conversion_error(
    error: msgspec.ValidationError, table: Mapping[str, Any], kind: type[msgspec.Struct]
) -> ConfigError:
    """What to tell of a `table` that could not be converted to `kind`, with the remedy."""
    if isinstance(error.__cause__, ConfigError):
        return error.__cause__
    field, message = field_and_fault(error)
    remedy = PAGE
    if message.startswith("Invalid enum value"):
        message = f"is not one of {', '.join(_field_choices(field, kind))}"
    else:
        message = expectation_clause(message)
        value = _value_at(table, field)
        for name in value if isinstance(value, Mapping) else ():  # a table that has become a single value
            if removed := removed_setting(f"{field}.{name}", value[name]):
                return removed
        if message.startswith("must be a table, not") and field in kind.__struct_fields__:
            remedy = " ".join([*_fields_sentence(field, kind), PAGE])
    field = field or "config"
    return ConfigError(field, _value_at(table, field), message, remedy)


def check_names(table: Mapping[str, Any], kind: type[msgspec.Struct]) -> None:
    """Raises ConfigError for a name in `table`, or in a table in it, that is no field of `kind`."""
    for path in _unknown_names(table, kind):
        raise unknown_field(path, table, kind)


def _unknown_names(table: Mapping[str, Any], kind: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    """The dotted names that are no fields; `policy[0].lr` in a list of tables."""
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
            for number, one in enumerate(value):
                if isinstance(one, Mapping):
                    yield from _unknown_names(one, struct, f"{path}[{number}].")


def _struct_in(kind: Any) -> type[msgspec.Struct] | None:
    """The struct that a field of this type holds: by itself, in a list, or unless it is None."""
    for part in (kind, *get_args(kind)):
        if isinstance(part, type) and issubclass(part, msgspec.Struct):
            return part
    return None


def unknown_field(field: str, table: Mapping[str, Any], kind: type[msgspec.Struct]) -> ConfigError:
    """The error for a name that is no field: what replaces it, where it belongs, or names that are close."""
    value = _value_at(table, field)
    name_without_indices = re.sub(r"\[[^]]*\]", "", field)  # of a list of tables: policy[0].lr
    if removed := removed_setting(name_without_indices, value):
        return removed
    parent, _, name = name_without_indices.rpartition(".")
    if name in TRUNCATIONS and parent in ("", "sampling", "policy"):
        message = "cannot be set for training: which tokens it cuts away depends on the weights that are trained"
        remedy = f"Set it for evaluations, in a [[policy]] table: evaluation = {{ {name} = {value} }}"
        return ConfigError(field, value, message, remedy)
    message = "is not a field of the configuration"
    if field in table and "." in field:  # a dotted name as a key of its own
        parent, _, name = field.partition(".")
        remedy = f"Here it is a table: {parent} = {{{name!r}: {table[field]!r}}}. {PAGE}"
        return ConfigError(field, table[field], message, remedy)
    return ConfigError(field, value, message, " ".join([*_other_place_hint(field, kind), PAGE]))


def _other_place_hint(field: str, kind: type[msgspec.Struct]) -> Iterator[str]:
    """A hint for a setting that does not exist: the table in which a setting of this name belongs, or settings with
    similar names. Yields at most one sentence."""
    name = field.rpartition(".")[2]
    settings = list(_field_names(kind))
    if field in _ARGUMENTS:
        yield f"It is {_ARGUMENTS[field]}."
    elif same_name := [other for other in settings if other.rpartition(".")[2] == name]:
        above = " (at the top of the file, above the first [table])" if name in same_name else ""
        yield f"It belongs elsewhere: {' or '.join(same_name)}{above}."
    elif similar_names := _similar_fields(field, settings):
        yield did_you_mean(similar_names)


def _similar_fields(field: str, known: Sequence[str]) -> list[str]:
    """At most three fields that have almost this last name, those of the same table first."""
    table, _, name = field.lower().rpartition(".")
    lasts = near_names(name, {one.rpartition(".")[2] for one in known}, cutoff=0.75)
    found = [one for one in known if one.rpartition(".")[2] in lasts]
    return sorted(found, key=lambda one: one.rpartition(".")[0] != table)[:3]


def _fields_sentence(field: str, kind: type[msgspec.Struct]) -> Iterator[str]:
    """The fields of a table, as a sentence; nothing where it takes any."""
    if names := [name for name in _field_names(kind) if name.startswith(f"{field}.")]:
        yield f"Its fields: {', '.join(names)}."


def _field_names(kind: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    """The dotted names of all fields in tables of one configuration; those of [[policy]] tables are not in it."""
    for field in msgspec.structs.fields(kind):
        yield prefix + field.name
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from _field_names(field.type, f"{prefix}{field.name}.")


def _value_at(table: Any, dotted: str) -> Any:
    for part in re.findall(r"[^.\[\]]+", dotted):
        if isinstance(table, Mapping):
            table = table.get(part)
        else:
            table = table[int(part)] if isinstance(table, Sequence) and part.isdigit() else None
    return table


def _field_choices(dotted: str, kind: Any) -> list[str]:
    """The values that a field of a few words takes; none for other fields."""
    for part in re.findall(r"[a-z_]+", dotted):
        kind = next(f.type for f in msgspec.structs.fields(kind) if f.name == part)
        kind = next((a for a in get_args(kind) if isinstance(a, type) and issubclass(a, msgspec.Struct)), kind)
    words = [word for part in (kind, *get_args(kind)) if get_origin(part) is Literal for word in get_args(part)]
    return sorted(map(str, words))
