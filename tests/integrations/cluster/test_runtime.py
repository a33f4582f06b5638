"""How Ray is started, without Ray."""

from __future__ import annotations

import pytest

from cotune.errors import ConfigError
from cotune.integrations.cluster import runtime


class SlowRay:
    """Its node is not up in time for the first `late` starts."""

    def __init__(self, late: int) -> None:
        self.late = late
        self.starts = 0

    def init(self, **arguments: object) -> None:
        self.starts += 1
        if self.starts <= self.late:
            raise Exception("The current node timed out during startup. This could happen because ...")

    def shutdown(self) -> None: ...


def test_a_node_that_is_late_is_started_once_more() -> None:
    ray = SlowRay(late=1)
    runtime._start(ray, {"address": "local"})
    assert ray.starts == 2


def test_a_node_that_is_late_again_ends_with_the_cause() -> None:
    ray = SlowRay(late=9)
    with pytest.raises(ConfigError, match=r"timed out during startup.*load and memory"):
        runtime._start(ray, {"address": "local"})
    assert ray.starts == 2
