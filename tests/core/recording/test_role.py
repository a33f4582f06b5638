"""`cotune.role`: as a block, in generators, across tasks and threads, and as a decorator."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import gc
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

import cotune
from cotune.errors import WorkflowError
from cotune.recording.context import generator_roles, identify
from tests.integrations.recorded import Recorded


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    gc.collect()
    assert generator_roles == {}


def in_episode(run: Callable[[], Any]) -> Any:
    """What a workflow returns, sync or async."""
    results: list[Any] = []
    noise: list[Any] = []

    async def main(task: Any) -> float:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: noise.append(context))
        result = run()
        results.append(await result if asyncio.iscoroutine(result) else result)
        return 1.0

    Recorded()(main)
    assert noise == []
    return results[0]


def who() -> str:
    """The role that a call here would have."""
    return identify().role


async def words() -> AsyncIterator[str]:
    with cotune.role("writer"):
        for _ in range(3):
            await asyncio.sleep(0)
            yield who()


def lines() -> Iterator[str]:
    with cotune.role("writer"):
        for _ in range(3):
            yield who()


# A generator's role is its own


async def read_words() -> list[str]:
    return [role async for word in words() for role in (word, who())]


def read_lines() -> list[str]:
    return [role for line in lines() for role in (line, who())]


@pytest.mark.parametrize("read", [read_words, read_lines])
def test_the_consumer_of_a_generator_keeps_its_role(read: Callable[[], Any]) -> None:
    assert in_episode(read) == ["writer", "app"] * 3

    async def under_a_role() -> Any:
        with cotune.role("reader"):
            result = read()
            return (await result if asyncio.iscoroutine(result) else result), who()

    assert in_episode(under_a_role) == (["writer", "reader"] * 3, "reader")


def test_the_inner_role_wins_whoever_was_first() -> None:
    def run() -> list[str]:
        roles = []
        generator = lines()
        roles.append(next(generator))
        with cotune.role("later"):
            roles += [next(generator), who()]

        def nested() -> Iterator[str]:
            with cotune.role("outer"):
                with cotune.role("inner"):
                    yield who()
                yield who()
                yield called()

        def called() -> str:
            with cotune.role("helper"):
                return who()

        with cotune.role("reader"):
            roles += nested()
        generator.close()
        return [*roles, who()]

    assert in_episode(run) == ["writer", "writer", "later", "inner", "outer", "helper", "app"]


def test_a_generator_that_is_abandoned_leaves_nothing() -> None:
    async def run() -> str:
        async for _ in words():
            break
        for _ in lines():
            break
        gc.collect()
        await asyncio.sleep(0.01)
        return who()

    assert in_episode(run) == "app"


def test_a_generator_may_be_stepped_and_closed_by_other_tasks_and_threads() -> None:
    async def step(generator: AsyncIterator[str]) -> str:
        return await anext(generator)

    async def run() -> list[Any]:
        generator = words()
        roles: list[Any] = [await asyncio.create_task(step(generator)) for _ in range(2)]
        await asyncio.create_task(generator.aclose())  # type: ignore[attr-defined]
        from_threads = lines()
        roles += [await asyncio.to_thread(next, from_threads) for _ in range(2)]
        await asyncio.to_thread(from_threads.close)  # type: ignore[attr-defined]
        return [*roles, who()]

    assert in_episode(run) == ["writer"] * 4 + ["app"]


def test_tasks_and_threads_have_the_role_of_whoever_started_them() -> None:
    async def run() -> dict[str, str]:
        roles: dict[str, str] = {}
        may_go = asyncio.Event()

        async def task(name: str) -> None:
            await may_go.wait()
            roles[name] = who()

        def thread(name: str) -> None:
            roles[name] = who()

        async def generator() -> AsyncIterator[list[Any]]:
            with cotune.role("writer"):
                started = [asyncio.create_task(task("the generator's task"))]
                await asyncio.to_thread(thread, "the generator's thread")
                await asyncio.gather(asyncio.sleep(0), asyncio.wait_for(asyncio.to_thread(thread, "nested"), 5))
                yield started

        async for started in generator():
            own = threading.Thread(target=thread, args=("the consumer's thread",))
            own.start()
            own.join()
            started.append(asyncio.create_task(task("the consumer's task")))
            may_go.set()
            await asyncio.gather(*started)
        return roles

    assert in_episode(run) == {
        "the generator's task": "writer",
        "the generator's thread": "writer",
        "nested": "writer",
        "the consumer's thread": "app",
        "the consumer's task": "app",
    }


# A context manager that is written as a generator is a block of its user


@contextlib.contextmanager
def as_writer() -> Iterator[None]:
    with cotune.role("writer"):
        yield


@contextlib.asynccontextmanager
async def as_async_writer() -> AsyncIterator[None]:
    with cotune.role("writer"), contextlib.ExitStack() as stack:
        stack.enter_context(as_writer())
        yield


def test_a_context_manager_around_the_role_holds_for_its_block() -> None:
    async def run() -> list[str]:
        roles = []
        with as_writer():
            roles.append(who())
            await asyncio.sleep(0)
            roles.append(who())
        async with as_async_writer():
            roles.append(who())
        with contextlib.ExitStack() as stack:
            stack.enter_context(as_writer())
            roles.append(who())
        roles.append(as_writer()(who)())

        async def generator() -> AsyncIterator[str]:
            with as_writer():
                yield who()

        roles += [role async for word in generator() for role in (word, who())]
        return [*roles, who()]

    assert in_episode(run) == ["writer"] * 6 + ["app", "app"]


def test_leaving_a_block_in_another_context_raises_nothing() -> None:
    def run() -> str:
        block = as_writer()
        contextvars.copy_context().run(block.__enter__)
        contextvars.copy_context().run(block.__exit__, None, None, None)
        return who()

    assert in_episode(run) == "app"


# The decorator


@cotune.role("writer")
def plain(text: str) -> str:
    """Writes."""
    return who() + text


@cotune.role("writer")
async def coroutine(text: str) -> str:
    await asyncio.sleep(0)
    return who() + text


@cotune.role("writer")
def generator(text: str) -> Iterator[str]:
    try:
        sent = yield who() + text
        yield f"{who()} {sent}"
    except KeyError as error:
        yield f"{who()} {error!r}"
    return "returned"


@cotune.role("writer")
async def async_generator(text: str) -> AsyncIterator[str]:
    await asyncio.sleep(0)
    try:
        sent = yield who() + text
        yield f"{who()} {sent}"
    except KeyError as error:
        yield f"{who()} {error!r}"


def test_functions_and_coroutines_are_decorated() -> None:
    assert plain.__doc__ == "Writes."
    assert in_episode(lambda: plain("!")) == "writer!"
    assert in_episode(lambda: coroutine("!")) == "writer!"
    assert in_episode(lambda: cotune.role("other")(functools.partial(coroutine, "!"))()) == "writer!"
    assert in_episode(who) == "app"


def test_generators_are_decorated() -> None:
    def run() -> list[str]:
        made: Any = generator("!")
        roles = [next(made), who(), made.send("sent"), who()]
        made = generator("!")
        roles += [next(made), made.throw(KeyError("thrown")), who()]
        with pytest.raises(StopIteration, match=r"returned"):
            next(made)
        return roles

    assert in_episode(run) == ["writer!", "app", "writer sent", "app", "writer!", "writer KeyError('thrown')", "app"]


def test_asynchronous_generators_are_decorated() -> None:
    async def run() -> list[str]:
        made: Any = async_generator("!")
        roles = [await anext(made), who(), await made.asend("sent"), who()]
        made = async_generator("!")
        roles += [await anext(made), await made.athrow(KeyError("thrown")), who()]
        with pytest.raises(StopAsyncIteration):
            await anext(made)
        closed: Any = async_generator("!")
        await anext(closed)
        await closed.aclose()
        return [*roles, who()]

    expected = ["writer!", "app", "writer sent", "app", "writer!", "writer KeyError('thrown')", "app", "app"]
    assert in_episode(run) == expected


def test_what_the_decorator_cannot_cover_is_refused() -> None:
    with pytest.raises(WorkflowError, match=r"cannot decorate Recorded.*takes functions"):
        cotune.role("writer")(Recorded)
    with pytest.raises(WorkflowError, match=r"cannot decorate a int: .*takes|cannot decorate an? int.*takes functions"):
        cotune.role("writer")(7)  # type: ignore[type-var]
    hidden = cotune.role("writer")(lambda: coroutine("!"))
    with pytest.raises(WorkflowError, match=r"returns a coroutine.*below the other decorators"):
        hidden()
    with pytest.raises(WorkflowError, match=r"returns a generator"):
        cotune.role("writer")(lambda: generator("!"))()


@pytest.mark.parametrize("name", ["", None, 7])
def test_a_name_that_is_no_text_is_refused(name: Any) -> None:
    with pytest.raises(WorkflowError, match=r"a text that is not empty"):
        cotune.role(name)


def test_one_block_is_not_entered_twice_at_once() -> None:
    block = cotune.role("writer")
    with block, pytest.raises(WorkflowError, match=r"entered already"):
        block.__enter__()
    with block:
        assert who() == "writer"


def test_an_asynchronous_generator_outside_asyncio_is_refused() -> None:
    made: Any = words()
    with pytest.raises(
        WorkflowError, match=r"under a library other than asyncio.*coroutines that the generator awaits"
    ):
        made.asend(None).send(None)
