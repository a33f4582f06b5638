"""Reads along with a streamed response: the application gets every chunk when it comes, the recorder all at the end."""

from __future__ import annotations

import functools
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

Settle = Callable[[bytes, BaseException | None, bool], None]


def tee(response: Any, settle: Settle) -> Callable[[], None]:
    """Replace the stream of an httpx or httpx2 response; `settle(body, error, ended)` is called once, at its close.

    `ended` says whether the sender came to its end. What is returned settles at once, with what has been read so far.
    """
    package = package_of(response)
    stream = _stream_class(package)(package, response, settle)
    response.stream = stream
    return functools.partial(stream.settle, None)


def package_of(message: Any) -> Any:
    """The package that a request or response belongs to, itself or by a base class: httpx or httpx2."""
    packages = (cls.__module__.partition(".")[0] for cls in type(message).__mro__)
    return sys.modules[next(name for name in packages if name.startswith("httpx"))]


class _Tee:
    def __init__(self, package: Any, response: Any, settle: Settle) -> None:
        self._inner = response.stream
        self._encoding = response.headers.get("content-encoding")
        self._package = package
        self._settle = settle
        self._chunks: list[bytes] = []
        self._settled = False
        self._ended = False

    def __iter__(self) -> Iterator[bytes]:
        try:
            for chunk in self._inner:
                self._chunks.append(chunk)
                yield chunk
            self._ended = True
        except GeneratorExit:
            raise
        except BaseException as error:
            self.settle(error)
            raise

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._inner:
                self._chunks.append(chunk)
                yield chunk
            self._ended = True
        except GeneratorExit:
            raise
        except BaseException as error:
            self.settle(error)
            raise

    def close(self) -> None:
        self.settle(None)
        self._inner.close()

    async def aclose(self) -> None:
        self.settle(None)
        await self._inner.aclose()

    def settle(self, error: BaseException | None) -> None:
        """End the record with what was read; only the first call counts."""
        if self._settled:
            return
        self._settled = True
        raw = b"".join(self._chunks)
        if self._encoding:
            try:
                raw = self._package.Response(200, headers={"content-encoding": self._encoding}, content=raw).content
            except self._package.DecodingError as broken:
                raw, error = b"", error or broken
        self._settle(raw, error, self._ended)


@functools.cache
def _stream_class(package: Any) -> type[_Tee]:
    return type("Tee", (_Tee, package.SyncByteStream, package.AsyncByteStream), {})
