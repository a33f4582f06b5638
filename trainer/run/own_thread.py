"""A learner that does all its work in one thread.

OpenMP starts a set of threads for each thread that computes. If it has more threads than there are cores, they sleep
after every matrix product instead of waiting for the next one: on two cores an update took 1.35 times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from cotune.trainer.learner.protocol import Learner, LearnerAround


class OwnThread(LearnerAround):
    """A learner that is opened and called in one separate thread. The thread ends when the learner is deleted."""

    def __init__(self, open: Callable[[], Learner]) -> None:
        """Open the learner. Raises the errors of `open`."""
        thread = ThreadPoolExecutor(1, "cotune-learner")
        learner = thread.submit(open).result()
        super().__init__(cast(Learner, _CallsInThread(learner, thread)))


class _CallsInThread:
    """Has the methods of a learner, and calls each of them in a thread."""

    def __init__(self, learner: Learner, thread: ThreadPoolExecutor) -> None:
        self._learner = learner
        self._thread = thread

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._learner, name)

        def call(*args: Any, **options: Any) -> Any:
            return self._thread.submit(method, *args, **options).result()

        return call
