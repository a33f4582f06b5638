"""Tools of AutoGen: their results are recorded, and given again in a replay, where the episode records tools."""

from __future__ import annotations

from autogen_core.tools import BaseTool

from cotune.integrations.patching import each_subclass, replace_method
from cotune.replay.tools import framework_tool


def install() -> None:
    """Wrap all tool classes, those there are and those to come."""
    each_subclass(BaseTool, lambda cls: replace_method(cls, "run", framework_tool()))
