"""A learner that does all its work in one thread.

OpenMP has a set of threads for each thread that computes. If these are more than the cores, they sleep after every
matrix product instead of waiting for the next one: on two cores an update took 1.35 times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from cotune.trainer.learner.protocol import Learner, LearnerAround


class OwnThread(LearnerAround):
    """A learner that is opened (by `open`) and called in one separate thread. The thread ends with it."""

    def __init__(self, open: Callable[[], Learner]) -> None:
        """Open the learner. Raises the errors of `open`."""
        thread = ThreadPoolExecutor(1, "cotune-learner")
        super().__init__(cast(Learner, _Calls(thread.submit(open).result(), thread)))


class _Calls:
    """The methods of a learner, called in a thread."""

    def __init__(self, learner: Learner, thread: ThreadPoolExecutor) -> None:
        self._learner = learner
        self._thread = thread

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._learner, name)

        def call(*args: Any, **more: Any) -> Any:
            return self._thread.submit(method, *args, **more).result()

        return call
