"""Functions and tools whose results a replay gives again: `cotune.recorded`, and what integrations wrap."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from cotune.errors import WorkflowError
from cotune.recording.context import current_episode
from cotune.recording.recorder import LiveEpisode
from cotune.recording.tape import ToolUse, arguments_of, tool_at_work

F = TypeVar("F", bound=Callable[..., Any])


def recorded(fn: F) -> F:
    """Decorate a function whose results are recorded in an episode, and given again where the episode is replayed.

    For a function that has effects, costs money or answers differently the second time: in the part of a replay that
    repeats the record it does not run. Results must be JSON values; others are not kept (counted as `unrecorded_tool`)
    and the function runs again, as it does after an exception. Outside an episode it is as before. Raises
    WorkflowError for a generator.

    ```python
    @cotune.recorded
    def charge(order: str, cents: int) -> dict[str, int]:
        return shop.charge(order, cents)
    ```
    """
    if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise WorkflowError(f"{fn.__name__} is a generator, which cannot be recorded.", "Return a list instead.")
    return taped(fn, lambda live, args, kwargs: f"{fn.__module__}.{fn.__qualname__}")  # type: ignore[return-value]


def taped(
    original: Callable[..., Any],
    name_of: Callable[[LiveEpisode, tuple[Any, ...], dict[str, Any]], str | None],
    *,
    skip: int = 0,
    without: Sequence[str] = (),
) -> Callable[..., Any]:
    """`original` with its results recorded and given again, where `name_of` gives a name for the tool.

    The first `skip` arguments and those named in `without` do not tell two uses apart.
    """

    @contextmanager
    def use_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[ToolUse]:
        """One use of the tool; it is recorded in an episode, unless the tool itself makes it."""
        live, at_work = current_episode.get(), tool_at_work.get().use
        name = None if live is None else name_of(live, args, kwargs)
        if live is None or name is None or (at_work is not None and at_work.name == name):
            yield ToolUse("", "")
            return
        started = live.now()
        with live.tape.using(name, arguments_of(args[skip:], kwargs, without)) as use:
            yield use
            if not live.tape.keep(use, started, live.now() - started):
                text = f"The value that {name} returned is not JSON, so a replay runs it again."
                live.warn("unrecorded_tool", text)

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        with use_of(args, kwargs) as use:
            if not use.known:
                use.value = original(*args, **kwargs)
        return use.value

    @functools.wraps(original)
    async def run_async(*args: Any, **kwargs: Any) -> Any:
        with use_of(args, kwargs) as use:
            if not use.known:
                use.value = await original(*args, **kwargs)
        return use.value

    return run_async if inspect.iscoroutinefunction(original) else run


def framework_tool(*without: str) -> Callable[[Any], Any]:
    """A wrapper of a method that runs a framework's tool, for episodes that record such tools. Arguments named in
    `without` belong to the run and not to the use."""

    def wrapper(original: Any) -> Any:
        def name_of(live: LiveEpisode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
            return str(getattr(args[0], "name", type(args[0]).__name__)) if live.tape.frameworks else None

        return taped(original, name_of, skip=1, without=without)

    return wrapper
