"""How long a server's event loop works without a pause: run as a script it is the `cotune` command, whose server tells.

It counts the processor time of the loop's thread, so what else the machine does changes nothing.
"""

from __future__ import annotations

import asyncio
import mmap
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MOST = 0.05
"""Most seconds that a loop may work without a pause."""
BEAT = 0.005
"""Seconds between two looks, which a figure may be too high by."""
SECONDS = struct.Struct("d")


def watch(loop: asyncio.AbstractEventLoop, tell: Callable[[float], None]) -> Callable[[], None]:
    """Tell of each stretch that `loop`, which runs in this thread, works without a pause; returns what ends it."""
    timer = loop.call_later(BEAT, lambda: look(time.thread_time()))

    def look(before: float) -> None:
        nonlocal timer
        tell(time.thread_time() - before)
        timer = loop.call_later(BEAT, look, time.thread_time())

    return lambda: timer.cancel()


class Longest:
    """The longest stretch that was told of, kept in a file that the process and its test both map."""

    def __init__(self, file: Path) -> None:
        with file.open("a+b") as opened:
            opened.truncate(SECONDS.size)
            self._kept = mmap.mmap(opened.fileno(), SECONDS.size)

    @property
    def seconds(self) -> float:
        return float(SECONDS.unpack_from(self._kept)[0])

    def tell(self, seconds: float) -> None:
        if seconds > self.seconds:
            SECONDS.pack_into(self._kept, 0, seconds)

    def reset(self) -> None:
        SECONDS.pack_into(self._kept, 0, 0.0)


def main() -> None:
    """Run the command of `sys.argv`, whose first word is the file of the figure."""
    import uvicorn

    longest = Longest(Path(sys.argv.pop(1)))
    startup = uvicorn.Server.startup

    async def watched(self: uvicorn.Server, *given: Any, **named: Any) -> None:
        await startup(self, *given, **named)
        watch(asyncio.get_running_loop(), longest.tell)

    uvicorn.Server.startup = watched  # type: ignore[method-assign]
    from cotune_command import run

    run()


if __name__ == "__main__":
    main()
