"""Connections of the OpenAI SDK over which models answer out of sight: counted, because nothing there is recorded."""

from __future__ import annotations

import sys
from typing import Any

from cotune.integrations.apps.patching import replace_method
from cotune.recording.context import current_episode

MODULES = (
    "openai.resources.responses.responses",
    "openai.resources.beta.responses.responses",
    "openai.resources.realtime.realtime",
    "openai.resources.beta.realtime.realtime",
)


def install() -> None:
    """Wrap `connect` of the modules that are loaded; those that come later call this again."""
    for module in [sys.modules[name] for name in MODULES if name in sys.modules]:
        for cls in [found for found in vars(module).values() if isinstance(found, type)]:
            replace_method(cls, "connect", _counted)


def _counted(original: Any) -> Any:
    def connect(self: Any, *args: Any, **kwargs: Any) -> Any:
        episode = current_episode.get()
        if episode is not None:
            episode.warn(
                "unseen_call",
                f"{type(self).__name__}.connect opens a socket on which a model answers: what it says there is not "
                "recorded. Use requests (client.responses.create) instead.",
            )
        return original(self, *args, **kwargs)

    return connect
