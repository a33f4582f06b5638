"""A learner that does all its work in one thread.

OpenMP keeps threads for each thread that computes. Where those are more than the cores, they sleep after every product
instead of waiting for the next: on two cores an update took 1.35 times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from cotune.trainer.learner.protocol import Learner, LearnerAround


class OwnThread(LearnerAround):
    """What `open` returns, opened and called in a thread of its own, which ends with it."""

    def __init__(self, open: Callable[[], Learner]) -> None:
        """Raises what `open` raises."""
        thread = ThreadPoolExecutor(1, "cotune-learner")
        super().__init__(cast(Learner, _Calls(thread.submit(open).result(), thread)))


class _Calls:
    """The methods of a learner, called in a thread."""

    def __init__(self, learner: Learner, thread: ThreadPoolExecutor) -> None:
        self._learner, self._thread = learner, thread

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._learner, name)

        def call(*args: Any, **more: Any) -> Any:
            return self._thread.submit(method, *args, **more).result()

        return call
