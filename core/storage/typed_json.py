"""JSON files of a run folder as typed values. An error names the file and the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from cotune.errors import RunError, field_and_fault

T = TypeVar("T")


def loaded(raw: bytes) -> Any:
    """A JSON value, which may hold NaN, as a figure may be. Raises ValueError, also for half a character."""
    found = json.loads(raw)
    if b"\\ud" in raw.lower():
        json.dumps(found, ensure_ascii=False).encode()
    return found


def read_typed(file: Path, kind: type[T], remedy: str) -> T:
    """The value of a file. Raises RunError for a file that cannot be read, or holds another type."""
    try:
        found = loaded(file.read_bytes())
    except OSError as error:
        raise RunError(f"{file} cannot be read: {error.strerror}.", remedy) from None
    except (ValueError, RecursionError) as error:
        raise RunError(f"{file} is broken: {fault(error)}.", remedy) from None
    return converted(file, found, kind, remedy)


def read_if_typed(file: Path, kind: type[T]) -> T | None:
    """The value of a file; None where it is missing, cannot be read, or holds another type."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def converted(file: Path, found: Any, kind: type[T], remedy: str) -> T:
    """A value of a file as a `kind`. Raises RunError for another type."""
    try:
        return msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        raise RunError(f"{file} is broken: {fault(error)}.", remedy) from None


def fault(error: Exception) -> str:
    """The fault, after the field that it is in."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if not isinstance(error, msgspec.ValidationError):
        return str(error)
    field, reason = field_and_fault(error)
    return f"{field}: {reason}" if field else reason
