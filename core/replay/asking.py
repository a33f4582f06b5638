"""Who asks clock, uuid or random: which episode, and which place in the application's code."""

from __future__ import annotations

import sys
from types import CodeType, FrameType

from cotune.recording.chance import Chance
from cotune.recording.context import current_episode
from cotune.runtime.user_code import is_library, is_standard

_AROUND = 3
"""Functions of the application around a place that tell it apart."""
_THROUGH = frozenset({"uuid", "random", "secrets"})
"""Modules whose callers are meant when they ask, beside those of the hooks."""
_STARTS = ("asyncio", "threading", "concurrent")
"""Packages beyond which the code that runs was not called by the application."""


def asking(hook: str, *, besides: tuple[str, ...] = (), own: bool = False) -> tuple[Chance, str] | None:
    """The chance of the episode that runs here, and the place that asks what the module `hook` has hooked.

    None outside frozen episodes, for the standard library, for packages that begin as `besides` says, and with `own`
    for all but the application's own code.
    """
    live = current_episode.get()
    if live is None or live.chance is None or live.ended:
        return None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and ((module := _module(frame)) in _THROUGH or module == hook):
        frame = frame.f_back
    if frame is None or _is_cotune(module) or module.startswith(besides) or is_standard(frame):
        return None
    return None if own and is_library(frame) else (live.chance, _place(frame))


def _place(frame: FrameType) -> str:
    """The function that asks, and functions of the application around it: not lines, which any edit moves."""
    names = [_name(frame.f_code, _module(frame))]
    outer = frame.f_back
    while outer is not None and len(names) <= _AROUND:
        module = _module(outer)
        if module.startswith(_STARTS) or _is_cotune(module):
            break
        if not is_library(outer):
            names.append(_name(outer.f_code, module))
        outer = outer.f_back
    return " < ".join(names)


def _name(code: CodeType, module: str) -> str:
    return f"{module}.{code.co_qualname}"


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_cotune(module: str) -> bool:
    return module == "cotune" or module.startswith("cotune.")
