"""cotune: train the agents you already have."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from cotune.context import role
from cotune.errors import CotuneError
from cotune.recording.episodes import activators
from cotune.workflows import runners, workflow

__all__ = ["CotuneError", "deployed", "evaluate", "gateway", "role", "trace", "train", "workflow"]

_LAZY = {
    "deployed": "cotune.adapters.deployed",
    "evaluate": "cotune.trainer.evaluation.evaluate",
    "gateway": "cotune.integrations.gateway.server",
    "trace": "cotune.recording.tracing",
    "train": "cotune.trainer.train",
}


def __getattr__(name: str) -> Any:
    """Open the parts that need more than the base install when they are first used."""
    if name not in _LAZY:
        raise AttributeError(f"module 'cotune' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return value


def _activate() -> None:
    from cotune.integrations import activate

    activate()


def _graph_runner(app: object) -> Callable[[Any], Awaitable[Any]] | None:
    from cotune.integrations import graph_runner

    return graph_runner(app)


activators.append(_activate)
runners.append(_graph_runner)
# Now as well: LangChain composes an agent's middleware when the agent is made, as applications do at import. What is
# refused is raised again by the first episode.
with suppress(CotuneError):
    _activate()
