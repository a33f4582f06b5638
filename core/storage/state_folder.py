"""The folder in which cotune keeps files for a user between processes, outside of run folders."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from cotune.storage.whole_file import whole_file

T = TypeVar("T")


def state_folder() -> Path:
    """`cotune` in XDG_STATE_HOME, or in ~/.local/state."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local/state") / "cotune"


def load_result(kind: str, key: bytes, type: type[T]) -> T | None:
    """The stored result of a measurement, or None. `key` names everything that the result depends on."""
    with contextlib.suppress(OSError, msgspec.DecodeError, msgspec.ValidationError):
        return msgspec.json.decode(_file(kind, key).read_bytes(), type=type)
    return None


def store_result(kind: str, key: bytes, result: Any) -> None:
    """Store the result of a measurement for later processes, if the folder can be written to."""
    file = _file(kind, key)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        # Two processes may measure the same at once, so each writes a file of its own, and the last one stays.
        written = file.with_suffix(f".{os.getpid()}")
        with whole_file(written) as out:
            out.write(msgspec.json.encode(result))
        written.replace(file)


def _file(kind: str, key: bytes) -> Path:
    return state_folder() / kind / f"{hashlib.sha256(key).hexdigest()[:32]}.json"
