"""`cotune view`."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from typing import Any

import msgspec

from cotune.cli.command import Parser, add_address, add_repeated, field_documentation, parse_prices
from cotune.terminal import tell

EXAMPLE = "cotune view runs/r1 runs/r2"
EXTRA = "view"
RUNS = "run folder, records file, postgresql://..., or folder of runs (default: runs)"
PRICE = "price per million tokens of a provider's model, for the costs that are shown"


def arguments(command: Parser) -> None:
    command.add_argument("runs", nargs="*", metavar="RUN", help=RUNS)
    add_address(command, port=8200)
    add_repeated(command, "--price", "MODEL=PROMPT/COMPLETION", PRICE)


def run(a: argparse.Namespace) -> int:
    """Start the viewer: pages about runs, for the browser."""
    from cotune.integrations.web.viewer.server import view
    from cotune.integrations.web.viewer.viewer import KnownField

    token = a.token or os.environ.get("COTUNE_TOKEN")
    known_fields = {name: KnownField(default, text) for name, default, text in documented_fields()}
    view(
        a.runs or ["runs"],
        tell,
        host=a.host,
        port=a.port,
        token=token,
        prices=parse_prices(a.price),
        fields=known_fields,
    )
    return 0


def documented_fields() -> Iterator[tuple[str, str, str]]:
    """The fields of a run's configuration in the order of the documentation: dotted name, default as the viewer shows
    it, and help."""
    from cotune.config.train import TrainConfig

    yield from _fields(TrainConfig, "")


def _fields(table: type[msgspec.Struct], prefix: str) -> Iterator[tuple[str, str, str]]:
    """Name (with `prefix`), default and documentation of each field of a table of the configuration, then of its
    tables.

    The order of the reference: required fields first, and nested tables after the plain fields.
    """
    documentation = field_documentation(table)
    nested_tables: list[tuple[str, type[msgspec.Struct]]] = []
    for field in sorted(msgspec.structs.fields(table), key=lambda field: not field.required):
        name = f"{prefix}{field.encode_name}"
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            nested_tables.append((f"{name}.", field.type))
        else:
            yield name, _default_text(field), documentation.get(field.name, "")
    for nested_prefix, nested_table in nested_tables:
        yield from _fields(nested_table, nested_prefix)


def _default_text(field: msgspec.structs.FieldInfo) -> str:
    """The default of a field as JSON, or as it is if it is a text; a dash for an empty text."""
    default: Any = None  # of a required field
    if field.default_factory is not msgspec.NODEFAULT:
        default = field.default_factory()
    elif field.default is not msgspec.NODEFAULT:
        default = field.default
    if isinstance(default, str):
        return default or "–"
    return json.dumps(msgspec.to_builtins(default), ensure_ascii=False)
