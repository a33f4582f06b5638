"""What scorers see of a call that an agent makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class AgentState:
    """`call.state` of a call by an agent of AutoGen or the OpenAI Agents SDK. The objects are live, and the
    application's. Of the Agents SDK only `agent` is known."""

    agent: Any
    """The agent that makes the call, or the manager of a team (its selector, its orchestrator)."""
    team: Any = None
    """The innermost team at work; None for an agent that runs alone."""
    received: tuple[Any, ...] = ()
    """Chat messages that the agent was given for this turn; for a manager the thread of its team."""
    prompt: tuple[Any, ...] = ()
    """The LLM messages of this call, as the agent passes them to its model client."""
