"""Records and answers the calls of a framework's models at the methods that call them.

This covers models that do not use the OpenAI SDK. A `Client` translates for one framework: a method's arguments to a
request, and an answer to the method's result. If a model uses the OpenAI SDK after all, its call is recorded once, as
the SDK sent it.
"""

from __future__ import annotations

from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from cotune.integrations.apps.patching import replace_method
from cotune.recording.edits import check_edits_sent, keep_own_format
from cotune.recording.model_calls import (
    ask,
    ask_async,
    end_call,
    fail_with_error,
    observed,
    open_call,
    step,
    step_async,
)
from cotune.recording.recorder import LiveCall
from cotune.records.answers import Answer

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a method: the positional ones, of which the model is the first, and the options."""


def json_schema(model: Any) -> dict[str, Any]:
    """A pydantic model as the `response_format` of a chat request."""
    return {"type": "json_schema", "json_schema": {"name": model.__name__, "schema": model.model_json_schema()}}


@dataclass(frozen=True, kw_only=True)
class Client:
    """The translation between the models of one framework and cotune.

    The functions take the arguments of the method, the model first. They are positional, because options may have any
    name.
    """

    request: Callable[..., Mapping[str, Any] | None]
    """The arguments as a chat request in OpenAI form; None for a call that is recorded elsewhere."""
    edited: Callable[..., Arguments]
    """`(edit, *arguments)`: the arguments with edited prompts, in copies of the application's objects."""
    reply: Callable[..., Any]
    """`(call, answer, *arguments)`: the method's result for an answer."""
    fixed_format: bool = False
    """Whether the schema of a response is passed as a class, whose texts cannot be edited."""
    answer: Callable[[Any], Answer]
    """An answer, from the model's result or from the list of parts that it streamed."""
    parts: Callable[[LiveCall, Answer], Iterable[Any]] = lambda call, answer: ()
    """The parts of a stream, from an answer."""
    begun: Callable[[list[Any]], Answer | None] = lambda parts: None
    """The incomplete answer of a stream that was interrupted, from its parts."""
    ends: Callable[[Any], bool] = lambda part: False
    """Whether a part is the last of its answer: the application may stop reading there."""
    asking: Callable[[LiveCall, Mapping[str, Any]], Awaitable[Answer | None] | None] = lambda call, options: None
    """An awaitable of the responder's answer, if the application can cancel it by an option of the method."""

    def _edit_arguments(self, call: LiveCall, args: tuple[Any, ...], options: dict[str, Any]) -> Arguments:
        """The arguments for the call of the client, so that it sends the edited prompts of the call.

        Returns the application's arguments if there are no edits, or if the client would not send them.
        """
        warn = call.episode.warn
        if self.fixed_format:
            keep_own_format(call, warn)
        if call.edits is None:
            return args, options
        edit = call.edits.text
        edited_args, edited_options = args, options

        def request_with_edits() -> Mapping[str, Any] | None:
            nonlocal edited_args, edited_options
            edited_args, edited_options = self.edited(edit, *args, **options)
            return self.request(*edited_args, **edited_options)

        # `check_edits_sent` looks for the edited texts in this request. It makes the request itself, because an error
        # must not stop the application.
        if check_edits_sent(call, request_with_edits, warn):
            return edited_args, edited_options
        return args, options

    def hook(self, cls: type, *, call: str = "", acall: str = "", stream: str = "", astream: str = "") -> None:
        """Wrap the methods of these names that the class itself defines."""
        for name, wrapper in ((call, self.call), (acall, self.acall), (stream, self.stream), (astream, self.astream)):
            replace_method(cls, name, wrapper)

    def call(self, original: Any) -> Any:
        """Wrap `original`, a method that returns the whole answer."""

        def run(*args: Any, **options: Any) -> Any:
            """Make a call of the client, recorded if it is inside an episode.

            The responder of the episode may answer instead of the provider. Both see the edited prompts.
            """
            # The request is built only inside an episode, therefore the lambda.
            call = open_call(lambda: self.request(*args, **options))
            if call is None:
                return original(*args, **options)
            if (answer := ask(call)) is not None:
                return self.reply(call, answer, *args, **options)
            args, options = self._edit_arguments(call, args, options)
            with observed(call):
                result = original(*args, **options)
            end_call(call, result, self.answer)
            return result

        return run

    def acall(self, original: Any) -> Any:
        """Wrap `original`, an asynchronous method that returns the whole answer."""

        async def run(*args: Any, **options: Any) -> Any:
            """Make an awaited call of the client, recorded if it is inside an episode.

            The responder of the episode may answer instead of the provider. Both see the edited prompts.
            """
            call = open_call(lambda: self.request(*args, **options))
            if call is None:
                return await original(*args, **options)
            if (answer := await ask_async(call, self.asking(call, options))) is not None:
                return self.reply(call, answer, *args, **options)
            args, options = self._edit_arguments(call, args, options)
            with observed(call):
                result = await original(*args, **options)
            end_call(call, result, self.answer)
            return result

        return run

    def stream(self, original: Any) -> Any:
        """Wrap `original`, a method that returns the answer in parts."""

        def run(*args: Any, **options: Any) -> Iterator[Any]:
            """Make a streamed call: yield its parts as they come, and record the answer that they add up to.

            A stream that fails or is closed early is recorded with the parts so far.
            """
            call = open_call(lambda: self.request(*args, **{**options, "stream": True}))
            if call is None:
                yield from original(*args, **options)
                return
            if (answer := ask(call)) is not None:
                yield from self.parts(call, answer)
                return
            args, options = self._edit_arguments(call, args, options)
            parts: list[Any] = []
            source = iter(original(*args, **options))
            try:
                while (part := step(call, source)) is not None:
                    self._add_part(call, parts, part)
                    yield part
            except BaseException as error:
                fail_with_error(call, error, self.begun(parts))
                raise
            end_call(call, parts, self.answer, self.begun)

        return run

    def astream(self, original: Any) -> Any:
        """Wrap `original`, an asynchronous method that returns the answer in parts."""

        async def run(*args: Any, **options: Any) -> AsyncIterator[Any]:
            """Make a streamed call in an async application: yield its parts as they come, and record the answer that
            they add up to.
            """
            call = open_call(lambda: self.request(*args, **{**options, "stream": True}))
            if call is None:
                # An asynchronous generator has no `yield from`.
                async with _closed_at_exit(original(*args, **options)) as source:
                    async for part in source:
                        yield part
                return
            if (answer := await ask_async(call, self.asking(call, options))) is not None:
                for part in self.parts(call, answer):
                    yield part
                return
            args, options = self._edit_arguments(call, args, options)
            parts: list[Any] = []
            async with _closed_at_exit(original(*args, **options)) as source:
                try:
                    while (part := await step_async(call, source)) is not None:
                        self._add_part(call, parts, part)
                        yield part
                except BaseException as error:
                    fail_with_error(call, error, self.begun(parts))
                    raise
            end_call(call, parts, self.answer, self.begun)

        return run

    def _add_part(self, call: LiveCall, parts: list[Any], part: Any) -> None:
        """Keep a part, and end the call with the last one: the application may never ask for another."""
        parts.append(part)
        if self.ends(part):
            end_call(call, parts, self.answer)


class Proxy:
    """Replaces an object of a framework inside an episode and behaves like it.

    A subclass changes single methods, which act on behalf of the owner.
    """

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
    """The object behind a proxy; any other value unchanged."""
    # `isinstance` would ask `__class__`, which a proxy takes from its inner object.
    return object.__getattribute__(value, "_cotune_inner") if issubclass(type(value), Proxy) else value


@asynccontextmanager
async def _closed_at_exit(stream: AsyncIterable[Any]) -> AsyncIterator[AsyncIterator[Any]]:
    """Iterate over an asynchronous stream in the block. Afterwards it is closed, if streams of its kind can be."""
    source = aiter(stream)
    try:
        yield source
    finally:
        if hasattr(source, "aclose"):
            await source.aclose()


async def step_inside(
    context: Callable[[], AbstractContextManager[None]],
    source: AsyncIterator[Any],
    before_yield: Callable[[Any], None] = lambda item: None,
) -> AsyncGenerator[Any, None]:
    """Yield the items of `source`, each step of it inside a new `context()`. `before_yield` gets each item first."""
    try:
        while True:
            with context():
                try:
                    item = await anext(source)
                except StopAsyncIteration:
                    return
            before_yield(item)
            yield item
    finally:
        if hasattr(source, "aclose"):
            with context():
                await source.aclose()


@dataclass(frozen=True)
class AgentState:
    """`call.state` of a call by an agent of AutoGen or the OpenAI Agents SDK.

    These are the live objects of the application, not copies. With the Agents SDK only `agent` is set.
    """

    agent: Any
    """The agent that makes the call, or the manager of a team (its selector, its orchestrator)."""
    team: Any = None
    """The innermost team at work; None for an agent that runs alone."""
    received: tuple[Any, ...] = ()
    """Chat messages that the agent received for this turn; for a manager, the thread of its team."""
    prompt: tuple[Any, ...] = ()
    """The LLM messages of this call, as the agent passes them to its model client."""
