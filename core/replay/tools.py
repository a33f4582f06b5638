"""Functions and tools whose results a replay returns again: `cotune.recorded`, and tools that integrations wrap."""

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
    """Decorate a function whose results are recorded in an episode, and returned again when the episode is replayed.

    Use it for a function that has effects, costs money or returns something else the second time: it does not run in
    the part of a replay that repeats the record. Results must be JSON values. Other results are not recorded (counted
    as `unrecorded_tool`); then, and after an exception, the function runs again in a replay. Outside an episode the
    function is unchanged. Raises WorkflowError for a generator.

    ```python
    @cotune.recorded
    def charge(order: str, cents: int) -> dict[str, int]:
        return shop.charge(order, cents)
    ```
    """
    if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise WorkflowError(f"{fn.__name__} is a generator, which cannot be recorded.", "Return a list instead.")
    return record_results(fn, lambda live, args, kwargs: f"{fn.__module__}.{fn.__qualname__}")  # type: ignore[return-value]


def record_results(
    original: Callable[..., Any],
    name_of: Callable[[LiveEpisode, tuple[Any, ...], dict[str, Any]], str | None],
    *,
    skip: int = 0,
    ignored_arguments: Sequence[str] = (),
) -> Callable[..., Any]:
    """A wrapper of `original`, a function that runs a tool. In an episode it records the results. In a replay it
    returns them again instead of running the tool.

    `name_of` returns the name of the tool for the arguments of a use, or None if the use is not recorded. A replay
    finds a result by this name and by the arguments, except the first `skip` ones and the `ignored_arguments`, which
    may differ from run to run.
    """

    @contextmanager
    def use_of_tool(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[ToolUse]:
        """A block around one use of the tool with these arguments. Yields the use.

        If `use.known` is set, `use.value` is the recorded result. If not, the block runs the tool and sets `use.value`,
        which is recorded after the block. Outside an episode, nothing is recorded.
        """
        live = current_episode.get()
        name = None
        if live is not None:
            name = name_of(live, args, kwargs)
        # Of a tool that calls itself, only the outer use is recorded: a replay does not run the inner ones.
        outer_use = tool_at_work.get().use
        calls_itself = outer_use is not None and outer_use.name == name
        if live is None or name is None or calls_itself:
            unrecorded_use = ToolUse("", "")
            yield unrecorded_use
            return
        started = live.now()
        with live.tape.use_tool(name, arguments_of(args[skip:], kwargs, ignored_arguments)) as use:
            yield use
            is_recorded = live.tape.record_result(use, started, live.now() - started)
            if not is_recorded:
                text = f"The value that {name} returned is not JSON, so a replay runs it again."
                live.warn("unrecorded_tool", text)

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        with use_of_tool(args, kwargs) as use:
            if not use.known:
                use.value = original(*args, **kwargs)
        return use.value

    @functools.wraps(original)
    async def run_async(*args: Any, **kwargs: Any) -> Any:
        with use_of_tool(args, kwargs) as use:
            if not use.known:
                use.value = await original(*args, **kwargs)
        return use.value

    return run_async if inspect.iscoroutinefunction(original) else run


def framework_tool(*ignored_arguments: str) -> Callable[[Any], Any]:
    """A decorator for the method that runs a tool of a framework. It records the results of the tool, and in a
    replay returns them again, in episodes that record the tools of frameworks.

    A replay finds a result by the tool and its arguments, except those named in `ignored_arguments`.
    """

    def decorate(original: Any) -> Any:
        def name_of(live: LiveEpisode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
            if not live.tape.frameworks:  # only functions under `cotune.recorded` are recorded in this episode
                return None
            tool = args[0]  # `self` of the method
            return str(getattr(tool, "name", type(tool).__name__))

        # The first argument is the tool itself, which is another object in each run.
        return record_results(original, name_of, skip=1, ignored_arguments=ignored_arguments)

    return decorate
