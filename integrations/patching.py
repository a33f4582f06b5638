"""Replacing methods of a framework's classes, those there are and those to come."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

_WRAPPED = "__cotune__"


def each_subclass(base: Any, wrap: Callable[[Any], None]) -> None:
    """Apply `wrap` to a class and all its subclasses, those there are and those to come."""
    for cls in [base, *_subclasses(base)]:
        wrap(cls)
    own = base.__dict__.get("__init_subclass__")

    def init_subclass(cls: Any, /, **kwargs: Any) -> None:
        if own is None:
            super(base, cls).__init_subclass__(**kwargs)
        else:
            own.__get__(None, cls)(**kwargs)
        wrap(cls)

    base.__init_subclass__ = classmethod(init_subclass)


def replace_method(cls: type, name: str, wrapper: Callable[[Any], Any]) -> None:
    """Wrap a method that the class itself defines and does not leave abstract, once."""
    original = cls.__dict__.get(name)
    if callable(original) and not hasattr(original, _WRAPPED) and not getattr(original, "__isabstractmethod__", False):
        wrapped = functools.wraps(original)(wrapper(original))
        setattr(wrapped, _WRAPPED, True)
        setattr(cls, name, wrapped)


def _subclasses(cls: Any) -> Iterator[Any]:
    for sub in cls.__subclasses__():
        yield sub
        yield from _subclasses(sub)
