"""Tools of LangChain: their results are recorded, and given again in a replay, where the episode records tools."""

from __future__ import annotations

from typing import Any

from langchain_core.tools.base import BaseTool

from cotune.integrations.patching import each_subclass, replace_method
from cotune.replay.tools import framework_tool

_RUNTIME = ("config", "run_manager", "callbacks", "runtime")
"""Arguments that belong to the run and not to the use."""


def install() -> None:
    """Wrap all tool classes, those there are and those to come."""
    each_subclass(BaseTool, _wrap)


def _wrap(cls: Any) -> None:
    if cls is not BaseTool:
        for name in ("_run", "_arun"):
            replace_method(cls, name, framework_tool(*_RUNTIME))
