"""Hooks of uuid, random, secrets and os.urandom: in a frozen episode their values go through its chance."""

from __future__ import annotations

import os
import random
import sys
import uuid
from collections.abc import Callable
from functools import cache, partial
from types import FrameType
from typing import Any

from cotune.recording.chance import Chance
from cotune.recording.context import current_episode
from cotune.runtime.user_code import is_library, is_library_file, is_standard

FRAMEWORKS = (
    "langgraph", "langchain", "langsmith", "autogen", "crewai", "agents", "openai", "anthropic", "httpx", "httpcore",
)  # fmt: skip
"""Packages that draw ids of their own, which are no part of a request and must stay apart in episodes side by side."""

_AROUND = 3
"""Functions of the application around a place that tell it apart."""
_THROUGH = frozenset({"uuid", "random", "secrets"})
"""Modules, besides those of the hooks, whose callers are meant when they ask."""
_STARTS = ("asyncio", "threading", "concurrent")
"""Packages beyond which the code that runs was not called by the application."""

_urandom = os.urandom
_seed = random.Random.seed
_uuid_time: Callable[[], tuple[bytes, int]] | None = getattr(uuid, "_generate_time_safe", None)


@cache
def install() -> None:
    """Hook them, also where a module has taken `random.random` and the like by name. Idempotent."""
    shared: Any = random._inst
    originals = (random.random, random.getrandbits, _urandom)
    shared.__class__ = _Shared  # the other functions of the module are methods of it
    hooked = (shared.random, shared.getrandbits, partial(_urandom_of, "urandom"))
    replace_everywhere(originals, hooked)
    random.Random.seed = _hooked_seed  # type: ignore[method-assign]
    if _uuid_time is not None:
        uuid._generate_time_safe = _hooked_uuid_time  # type: ignore[attr-defined]


def replace_everywhere(originals: tuple[Any, ...], hooked: tuple[Any, ...], *, own: bool = False) -> None:
    """Put `hooked` in the place of `originals` in all loaded modules that have them by whatever name; with `own` in
    those of the application alone."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        if str(names.get("__name__")).startswith("cotune.") or (own and is_library_file(names.get("__file__") or "<")):
            continue
        for name, value in list(names.items()):
            for original, new in zip(originals, hooked, strict=True):
                if value is original:
                    names[name] = new


def _asking() -> tuple[Chance, str] | None:
    return asking(__name__, besides=FRAMEWORKS)


def _urandom_of(kind: str, size: int) -> bytes:
    if (found := _asking()) is None:
        return _urandom(size)
    chance, place = found
    return bytes.fromhex(chance.drawn(f"{kind}:{size}", place, lambda: _urandom(size).hex()))


def _hooked_uuid_time() -> tuple[bytes, int]:
    assert _uuid_time is not None
    if (found := _asking()) is None:
        return _uuid_time()
    chance, place = found
    time = _uuid_time
    digits, safe = chance.drawn("uuid1", place, lambda: [(made := time())[0].hex(), made[1]])
    return bytes.fromhex(digits), safe


def _hooked_seed(self: random.Random, a: Any = None, version: int = 2) -> None:
    """A generator that is made without a seed gets one that is kept."""
    if a is None and type(self) is not _Shared and _asking() is not None:
        a = int.from_bytes(_urandom_of("seed", 32))
    _seed(self, a, version)


class _Shared(random.Random):
    """The generator behind the functions of `random`."""

    def random(self) -> float:
        if (found := _asking()) is None:
            return super().random()
        return float(found[0].drawn("random", found[1], super().random))

    def getrandbits(self, k: int, /) -> int:
        if (found := _asking()) is None:
            return super().getrandbits(k)
        bits = super().getrandbits
        return int(found[0].drawn(f"bits:{k}", found[1], lambda: hex(bits(k))), 16)

    @property
    def gauss_next(self) -> float | None:
        """The second of two normal numbers that are made at once: none in a frozen episode, as others share it."""
        return None if _asking() is not None else self.__dict__.get("gauss_next")

    @gauss_next.setter
    def gauss_next(self, value: float | None) -> None:
        self.__dict__["gauss_next"] = None if _asking() is not None else value


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
    names = [f"{_module(frame)}.{frame.f_code.co_qualname}"]
    outer = frame.f_back
    while outer is not None and len(names) <= _AROUND:
        module = _module(outer)
        if module.startswith(_STARTS) or _is_cotune(module):
            break
        if not is_library(outer):
            names.append(f"{module}.{outer.f_code.co_qualname}")
        outer = outer.f_back
    return " < ".join(names)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_cotune(module: str) -> bool:
    return module == "cotune" or module.startswith("cotune.")
