"""Hooks of uuid, random, secrets and os.urandom. In a frozen episode, its `Chance` records and returns their values."""

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
"""Packages that draw ids for internal use. These ids are not part of a request, and episodes that run at the same time
must not share them."""

_AROUND = 3
"""Number of the application's functions around a place that identify it."""
_THROUGH = frozenset({"uuid", "random", "secrets"})
"""Modules, besides those of the hooks, that only pass on a request: their caller counts as the one that asks."""
_STARTS = ("asyncio", "threading", "concurrent")
"""Packages that start tasks and threads: functions around them on the stack did not call the application's code."""

_urandom = os.urandom
_seed = random.Random.seed
_uuid_time: Callable[[], tuple[bytes, int]] | None = getattr(uuid, "_generate_time_safe", None)


@cache
def install() -> None:
    """Hook the functions of uuid, random, secrets and os.urandom, so that frozen episodes can record and return their
    values. Modules that have imported such a function by name get the hook too. Once per process, by the cache."""
    originals = (random.random, random.getrandbits, _urandom)
    # All functions of the module `random` are methods of one generator. Another class changes them all, except the two
    # methods in C that the module has stored.
    module_generator: Any = random._inst
    module_generator.__class__ = _Shared
    hooked_urandom = partial(_urandom_of, "urandom")
    replace_everywhere(originals, (module_generator.random, module_generator.getrandbits, hooked_urandom))
    random.Random.seed = _hooked_seed  # type: ignore[method-assign]
    if _uuid_time is not None:
        uuid._generate_time_safe = _hooked_uuid_time  # type: ignore[attr-defined]


def replace_everywhere(originals: tuple[Any, ...], hooked: tuple[Any, ...], *, only_application: bool = False) -> None:
    """Replace each function of `originals` with the one at the same position in `hooked`, under any name, in all loaded
    modules except cotune's. With `only_application`, modules of libraries keep the originals."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        if str(names.get("__name__")).startswith("cotune."):
            continue
        if only_application and is_library_file(names.get("__file__") or "<"):
            continue
        for name, value in list(names.items()):
            for original, new in zip(originals, hooked, strict=True):
                if value is original:
                    names[name] = new


def _recorded_values() -> tuple[Chance, str] | None:
    return recorded_values_here(__name__, except_packages=FRAMEWORKS)


def _urandom_of(kind: str, size: int) -> bytes:
    if (frozen := _recorded_values()) is None:
        return _urandom(size)
    chance, place = frozen
    return bytes.fromhex(chance.draw_value(f"{kind}:{size}", place, lambda: _urandom(size).hex()))


def _hooked_uuid_time() -> tuple[bytes, int]:
    """Replaces the function of `uuid` that makes the ids of `uuid.uuid1`. In a frozen episode, the id is recorded, or
    is a recorded one.

    Returns all 16 bytes of the id, and a status: 0 if no other process can have drawn the same id.
    """
    original = _uuid_time
    assert original is not None
    if (frozen := _recorded_values()) is None:
        return original()
    chance, place = frozen

    def draw_as_json() -> list[Any]:
        id, status = original()
        return [id.hex(), status]  # a record cannot hold bytes

    digits, status = chance.draw_value("uuid1", place, draw_as_json)
    return bytes.fromhex(digits), status


def _hooked_seed(self: random.Random, a: Any = None, version: int = 2) -> None:
    """Seed a generator. One without a seed gets a recorded seed."""
    if a is None and type(self) is not _Shared and _recorded_values() is not None:
        a = int.from_bytes(_urandom_of("seed", 32))
    _seed(self, a, version)


class _Shared(random.Random):
    """The generator behind the functions of `random`."""

    def random(self) -> float:
        if (frozen := _recorded_values()) is None:
            return super().random()
        chance, place = frozen
        return float(chance.draw_value("random", place, super().random))

    def getrandbits(self, k: int, /) -> int:
        if (frozen := _recorded_values()) is None:
            return super().getrandbits(k)
        chance, place = frozen
        bits = super().getrandbits
        return int(chance.draw_value(f"bits:{k}", place, lambda: hex(bits(k))), 16)

    @property
    def gauss_next(self) -> float | None:
        """The second of two normal numbers that are drawn together. None in a frozen episode, as all episodes share
        it."""
        return None if _recorded_values() is not None else self.__dict__.get("gauss_next")

    @gauss_next.setter
    def gauss_next(self, value: float | None) -> None:
        self.__dict__["gauss_next"] = None if _recorded_values() is not None else value


def recorded_values_here(
    hook: str, *, except_packages: tuple[str, ...] = (), only_application: bool = False
) -> tuple[Chance, str] | None:
    """For a hooked function such as `random.random`: the episode's values (`Chance`) to use instead of the real
    function, and the place in the code that calls it. None if the real function must be used.

    The real function is used outside a frozen episode, and for calls that the standard library or one of
    `except_packages` makes for its own purposes (they are given by the beginnings of their names). With
    `only_application`, it is used for calls from every library. `hook` is the module of the hook.
    """
    live = current_episode.get()
    if live is None or live.chance is None or live.ended:
        return None
    # The first frame outside the hook and outside modules that only pass on the call.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _module(frame) in (hook, *_THROUGH):
        frame = frame.f_back
    if frame is None:
        return None
    module = _module(frame)
    if _is_cotune(module) or module.startswith(except_packages) or is_standard(frame):
        return None
    if only_application and is_library(frame):
        return None
    return live.chance, _calling_functions(frame)


def _calling_functions(frame: FrameType) -> str:
    """The function of a frame and the nearest functions of the application around it, as one text. It has no line
    numbers, because any edit of the code changes these."""
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
