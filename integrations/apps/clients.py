"""Models of a framework that do not use the OpenAI SDK: recorded, or answered, at the methods by which they are called.

A `Client` says for one framework how a method's arguments are read as a request, and how an answer is returned. What a
model sends over the OpenAI SDK all the same is recorded once, as it went over the wire.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from cotune.integrations.apps.patching import replace_method
from cotune.recording.edits import leave_format, made_of
from cotune.recording.model_calls import ask, ask_async, end_call, observed, open_call, raised, step, step_async
from cotune.recording.recorder import LiveCall
from cotune.records.answers import Answer

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Of a method: the positional ones, the model first, and the options."""


def json_schema(model: Any) -> dict[str, Any]:
    """A pydantic model as the `response_format` of a chat request."""
    return {"type": "json_schema", "json_schema": {"name": model.__name__, "schema": model.model_json_schema()}}


@dataclass(frozen=True, kw_only=True)
class Client:
    """How the models of one framework are called. The functions take the arguments of the method, the model
    first; options may have any name, so the arguments before them are positional."""

    request: Callable[..., Mapping[str, Any] | None]
    """The arguments as a chat request in OpenAI form; None for a call that is recorded elsewhere."""
    edited: Callable[..., Arguments]
    """`(said, *arguments)`: positional arguments and options with what is said in place of the prompts, on copies of
    the application's objects."""
    reply: Callable[..., Any]
    """`(call, answer, *arguments)`: the method's result for an answer."""
    fixed_format: bool = False
    """Whether a response's schema is given as a class, of which no text can be edited."""
    answer: Callable[[Any], Answer]
    """What the model returned, or the list of parts that it streamed, as an answer."""
    parts: Callable[[LiveCall, Answer], Iterable[Any]] = lambda call, answer: ()
    """An answer as the parts of a stream."""
    begun: Callable[[list[Any]], Answer | None] = lambda parts: None
    """The answer so far in the parts of a stream that broke off."""
    ends: Callable[[Any], bool] = lambda part: False
    """Whether a part ends the answer: the application may stop reading there."""
    asking: Callable[[LiveCall, Mapping[str, Any]], Awaitable[Answer | None] | None] = lambda call, options: None
    """The responder's answer under way, where the application can cancel it by an option of the method."""

    def _sent(self, call: LiveCall, args: tuple[Any, ...], options: dict[str, Any]) -> Arguments:
        """The arguments with the edits of the call's prompts."""
        warn = call.episode.warn
        if self.fixed_format:
            leave_format(call, warn)
        if call.edits is None:
            return args, options
        said, made = call.edits.text, (args, options)

        def read() -> Mapping[str, Any] | None:
            nonlocal made
            made = self.edited(said, *args, **options)
            return self.request(*made[0], **made[1])

        return made if made_of(call, read, warn) else (args, options)

    def hook(self, cls: type, *, call: str = "", acall: str = "", stream: str = "", astream: str = "") -> None:
        """Wrap the methods of these names that the class itself defines."""
        for name, wrapper in ((call, self.call), (acall, self.acall), (stream, self.stream), (astream, self.astream)):
            replace_method(cls, name, wrapper)

    def call(self, original: Any) -> Any:
        """`original`, a method that returns the whole answer."""

        def run(*args: Any, **options: Any) -> Any:
            call = open_call(lambda: self.request(*args, **options))
            if call is None:
                return original(*args, **options)
            if (found := ask(call)) is not None:
                return self.reply(call, found, *args, **options)
            args, options = self._sent(call, args, options)
            with observed(call):
                result = original(*args, **options)
            end_call(call, result, self.answer)
            return result

        return run

    def acall(self, original: Any) -> Any:
        """The same of an asynchronous method."""

        async def run(*args: Any, **options: Any) -> Any:
            call = open_call(lambda: self.request(*args, **options))
            if call is None:
                return await original(*args, **options)
            if (found := await ask_async(call, self.asking(call, options))) is not None:
                return self.reply(call, found, *args, **options)
            args, options = self._sent(call, args, options)
            with observed(call):
                result = await original(*args, **options)
            end_call(call, result, self.answer)
            return result

        return run

    def stream(self, original: Any) -> Any:
        """`original`, a method that returns the answer in parts."""

        def run(*args: Any, **options: Any) -> Iterator[Any]:
            call = open_call(lambda: self.request(*args, **{**options, "stream": True}))
            if call is None:
                yield from original(*args, **options)
                return
            if (found := ask(call)) is not None:
                yield from self.parts(call, found)
                return
            args, options = self._sent(call, args, options)
            seen: list[Any] = []
            source = iter(original(*args, **options))
            try:
                while (part := step(call, source)) is not None:
                    self._see(call, seen, part)
                    yield part
            except BaseException as error:
                raised(call, error, self.begun(seen))
                raise
            end_call(call, seen, self.answer, self.begun)

        return run

    def astream(self, original: Any) -> Any:
        """The same of an asynchronous method."""

        async def run(*args: Any, **options: Any) -> AsyncIterator[Any]:
            call = open_call(lambda: self.request(*args, **{**options, "stream": True}))
            if call is not None and (found := await ask_async(call, self.asking(call, options))) is not None:
                for part in self.parts(call, found):
                    yield part
                return
            if call is not None:
                args, options = self._sent(call, args, options)
            seen: list[Any] = []
            source = aiter(original(*args, **options))
            try:
                while (part := await (anext(source, None) if call is None else step_async(call, source))) is not None:
                    if call is not None:
                        self._see(call, seen, part)
                    yield part
            except BaseException as error:
                if call is not None:
                    raised(call, error, self.begun(seen))
                raise
            finally:
                if hasattr(source, "aclose"):
                    await source.aclose()
            if call is not None:
                end_call(call, seen, self.answer, self.begun)

        return run

    def _see(self, call: LiveCall, seen: list[Any], part: Any) -> None:
        seen.append(part)
        if self.ends(part):
            end_call(call, seen, self.answer)


class Proxy:
    """Stands for an object of a framework inside an episode, on behalf of its owner. A subclass acts in its owner's
    name; in everything else it is that object."""

    __slots__ = ("_cotune_inner", "_cotune_owner")

    def __init__(self, inner: Any, owner: Any) -> None:
        object.__setattr__(self, "_cotune_inner", inner)
        object.__setattr__(self, "_cotune_owner", owner)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._cotune_inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cotune_inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._cotune_inner, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._cotune_inner, name)

    def __eq__(self, other: object) -> bool:
        return bool(self._cotune_inner == unwrapped(other))

    def __hash__(self) -> int:
        return hash(self._cotune_inner)

    def __repr__(self) -> str:
        return repr(self._cotune_inner)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._cotune_inner.__reduce_ex__(protocol)


def unwrapped(value: Any) -> Any:
    """The object itself, of a proxy."""
    return object.__getattribute__(value, "_cotune_inner") if issubclass(type(value), Proxy) else value


async def step_inside(
    context: Callable[[], AbstractContextManager[None]],
    source: AsyncIterator[Any],
    seen: Callable[[Any], None] = lambda item: None,
) -> AsyncGenerator[Any, None]:
    """The items of `source`, each step of which runs inside a new `context()`; `seen` gets each item first."""
    try:
        while True:
            with context():
                try:
                    item = await anext(source)
                except StopAsyncIteration:
                    return
            seen(item)
            yield item
    finally:
        if hasattr(source, "aclose"):
            with context():
                await source.aclose()


@dataclass(frozen=True)
class AgentState:
    """`call.state` of a call by an agent of AutoGen or the OpenAI Agents SDK. The objects are live, and the
    application's. Of the Agents SDK only `agent` is known."""

    agent: Any
    """The agent that makes the call, or the manager of a team (its selector, its orchestrator)."""
    team: Any = None
    """The innermost team at work; None for an agent that runs alone."""
    received: tuple[Any, ...] = ()
    """Chat messages that the agent was given for this turn; for a manager the thread of its team."""
    prompt: tuple[Any, ...] = ()
    """The LLM messages of this call, as the agent passes them to its model client."""
