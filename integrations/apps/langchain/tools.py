"""Tools of LangChain: their results are recorded, and given again in a replay, where the episode records tools."""

from __future__ import annotations

from langchain_core.tools.base import BaseTool

from cotune.integrations.apps.patching import record_tools


def install() -> None:
    """Wrap all tool classes, those there are and those to come."""
    record_tools(BaseTool, "_run", "_arun", without=("config", "run_manager", "callbacks", "runtime"))
