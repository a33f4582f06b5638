"""Public names whose modules need more than the base install. Each is imported when it is first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def opener(module: str, where: Mapping[str, str]) -> Callable[[str], Any]:
    """A `__getattr__` for `module`. `where` maps each of its lazy names to the module that defines it."""

    def __getattr__(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value = getattr(import_module(where[name]), name)
        setattr(sys.modules[module], name, value)
        return value

    return __getattr__
