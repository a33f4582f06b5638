"""JSON files of a run folder as typed values. An error names the file and the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from cotune.errors import RunError, field_and_fault

T = TypeVar("T")


def loaded(raw: bytes) -> Any:
    """A JSON value. NaN is allowed, as figures may be NaN. Raises ValueError, also for a lone surrogate."""
    value = json.loads(raw)
    if b"\\ud" in raw.lower():
        json.dumps(value, ensure_ascii=False).encode()  # raises for half of a surrogate pair
    return value


def read_typed(file: Path, kind: type[T], remedy: str) -> T:
    """The value in a file. Raises RunError for a file that cannot be read or holds another type."""
    try:
        value = loaded(file.read_bytes())
    except OSError as error:
        raise RunError(f"{file} cannot be read: {error.strerror}.", remedy) from None
    except (ValueError, RecursionError) as error:
        raise RunError(f"{file} is broken: {fault(error)}.", remedy) from None
    return converted(file, value, kind, remedy)


def read_if_typed(file: Path, kind: type[T]) -> T | None:
    """The value in a file; None if the file is missing, cannot be read, or holds another type."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def converted(file: Path, value: Any, kind: type[T], remedy: str) -> T:
    """A value from a file as a `kind`. Raises RunError for another type."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise RunError(f"{file} is broken: {fault(error)}.", remedy) from None


def fault(error: Exception) -> str:
    """A description of the error, which begins with the name of the field."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if not isinstance(error, msgspec.ValidationError):
        return str(error)
    field, reason = field_and_fault(error)
    return f"{field}: {reason}" if field else reason
