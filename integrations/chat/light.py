"""The chat format without torch: what a process needs that renders and parses, and computes nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from cotune.integrations.chat.template import ChatTemplate
from cotune.integrations.chat.tool_formats import AUTO, VLLM

_QUIET = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


def load_chat_light(model: str, tools: str = AUTO) -> ChatTemplate:
    """`ChatTemplate.load`, where transformers finds no torch: a third of the memory and half the time.

    In a process that has transformers or torch already, and for a tool parser of vLLM, it is the plain one. Afterwards
    transformers is imported anew by whoever asks for it, with torch. Not to be run while another thread imports
    transformers. Raises ConfigError.
    """
    if "transformers" in sys.modules or "torch" in sys.modules or tools.startswith(VLLM):
        return ChatTemplate.load(model, tools)
    with _without_torch():
        return ChatTemplate.load(model, tools)


@contextmanager
def _without_torch() -> Iterator[None]:
    quiet = os.environ.get(_QUIET)
    os.environ[_QUIET] = "1"  # transformers would say that it found no torch
    sys.modules["torch"] = None  # type: ignore[assignment]  # Python's own word for "not to be found"
    try:
        yield
    finally:
        del sys.modules["torch"]
        os.environ.pop(_QUIET)
        if quiet is not None:
            os.environ[_QUIET] = quiet
        for name in [name for name in sys.modules if name.split(".")[0] == "transformers"]:
            del sys.modules[name]
