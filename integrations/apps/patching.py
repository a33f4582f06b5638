"""Replaces methods of a framework's classes, present and future."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from cotune.recording.context import current_episode
from cotune.replay.tools import framework_tool

_WRAPPED = "__cotune__"


def each_subclass(base: Any, wrap: Callable[[Any], None]) -> None:
    """Apply `wrap` to a class and all its subclasses, present and future."""
    for cls in [base, *_subclasses(base)]:
        wrap(cls)
    original = base.__dict__.get("__init_subclass__")

    def init_subclass(cls: Any, /, **kwargs: Any) -> None:
        # `base` did not define the method itself: continue with the next class in the method resolution order.
        if original is None:
            super(base, cls).__init_subclass__(**kwargs)
        else:
            original.__get__(None, cls)(**kwargs)
        wrap(cls)

    base.__init_subclass__ = classmethod(init_subclass)


def replace_method(cls: type, name: str, wrapper: Callable[[Any], Any]) -> None:
    """Wrap a method that the class defines itself, not one it inherits. Abstract and already wrapped methods are
    skipped.
    """
    original = cls.__dict__.get(name)
    # A method may be reached twice, by its class and as a subclass: it must not be recorded twice.
    if callable(original) and not hasattr(original, _WRAPPED) and not getattr(original, "__isabstractmethod__", False):
        wrapped = functools.wraps(original)(wrapper(original))
        setattr(wrapped, _WRAPPED, True)
        setattr(cls, name, wrapped)


def replace_methods(base: Any, wrapper: Callable[[Any], Any], *names: str) -> None:
    """Wrap these methods of a class and all its subclasses, present and future."""

    def wrap(cls: type) -> None:
        for name in names:
            replace_method(cls, name, wrapper)

    each_subclass(base, wrap)


def record_tools(base: Any, *names: str, without: Sequence[str] = ()) -> None:
    """Wrap these methods of all classes of tools below `base`, present and future.

    If the episode records tools, their results are recorded, and a replay returns them again. `without` names arguments
    that differ from run to run, and so do not identify a use of the tool.
    """

    def wrap(cls: Any) -> None:
        for name in names if cls is not base else ():
            replace_method(cls, name, framework_tool(*without))

    each_subclass(base, wrap)


def bypasses_cache() -> bool:
    """Whether the present episode must neither read nor write a cache of the application. If so, it counts a warning.

    An answer of a policy (or of a dry run) is a sample of one version: no other sample, and no later run of the
    application, may get it. An answer to edited prompts must not be cached as an answer to the original ones.
    """
    episode = current_episode.get()
    if episode is None or (episode.responder is None and episode.prompting is None):
        return False
    episode.warn(
        "unused_cache",
        "The application caches answers: where policies answer, or prompts are edited, that cache is neither read nor "
        "written.",
    )
    return True


def unless_bypassed(original: Any) -> Any:
    """Wrap a method that reads or writes a cache: it returns None in an episode that bypasses the cache."""

    def use(self: Any, *args: Any, **options: Any) -> Any:
        return None if bypasses_cache() else original(self, *args, **options)

    return use


def run_inside(original: Any, context: Callable[..., AbstractContextManager[Any] | None]) -> Any:
    """Wrap a plain or an async function: in an episode it runs inside `context(*args, **kwargs)`, unless it is None."""

    def entered(args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[Any]:
        manager = None if current_episode.get() is None else context(*args, **kwargs)
        return nullcontext() if manager is None else manager

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        with entered(args, kwargs):
            return original(*args, **kwargs)

    @functools.wraps(original)
    async def run_async(*args: Any, **kwargs: Any) -> Any:
        with entered(args, kwargs):
            return await original(*args, **kwargs)

    return run_async if inspect.iscoroutinefunction(original) else run


def _subclasses(cls: Any) -> Iterator[Any]:
    for sub in cls.__subclasses__():
        yield sub
        yield from _subclasses(sub)
