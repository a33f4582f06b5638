"""LangChain's asynchronous dispatch of callbacks, shortened where the recorder's handler is the only one.

For every event LangChain inspects the handler's method anew and gathers the handlers that are to run beside it: most of
what a handler of a few lines costs.
"""

from __future__ import annotations

import functools
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler, manager


def install(handler: BaseCallbackHandler) -> None:
    """Call `handler` directly where it stands alone. Its methods must be synchronous, run inline and never raise."""
    dispatch = manager.ahandle_event

    @functools.wraps(dispatch)
    async def ahandle_event(handlers: list[Any], event: str, ignored: str | None, *args: Any, **kwargs: Any) -> None:
        if len(handlers) != 1 or handlers[0] is not handler:
            await dispatch(handlers, event, ignored, *args, **kwargs)
        elif ignored is None or not getattr(handler, ignored):
            getattr(handler, event)(*args, **kwargs)

    manager.ahandle_event = ahandle_event  # type: ignore[assignment]
