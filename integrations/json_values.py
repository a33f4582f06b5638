"""Arguments of models as JSON values, to be recorded."""

from __future__ import annotations

from typing import Any

import msgspec


def plain_json(value: Any) -> Any:
    """The value as JSON values only: an object with pydantic's `model_dump` as that gives it, any other as its text."""
    return msgspec.to_builtins(value, str_keys=True, enc_hook=_plain)


def _plain(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)
    return dump(mode="json") if callable(dump) and not isinstance(value, type) else str(value)
