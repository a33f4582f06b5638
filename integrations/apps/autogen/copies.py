"""Copies of an AutoGen team or agent, so that episodes on one object neither wait for nor see each other.

What holds the state of a conversation is copied: agents, teams, contexts, memories, termination conditions. Model
clients, tools, functions and runtimes are shared, as are messages, which do not change.
"""

from __future__ import annotations

import asyncio
import copy
import uuid
from collections import deque
from types import MethodType
from typing import Any

from autogen_agentchat.base import ChatAgent, Team, TerminationCondition
from autogen_core import AgentRuntime, SingleThreadedAgentRuntime
from autogen_core.memory import ListMemory, Memory
from autogen_core.model_context import ChatCompletionContext
from autogen_core.models import ChatCompletionClient
from autogen_core.tools import BaseTool, StaticWorkbench, Workbench
from pydantic import BaseModel

from cotune.errors import WorkflowError

_STATEFUL = (ChatAgent, Team, TerminationCondition, ChatCompletionContext, StaticWorkbench, ListMemory)
_SHARED = (ChatCompletionClient, BaseTool, Workbench, Memory, AgentRuntime, BaseModel, type)
_TEAM_ID = "_team_id"


def fresh(app: Any) -> Any:
    """A copy of an agent or team as it stands, with conversations of its own. Raises WorkflowError where it cannot."""
    return _copy(app, {})


def _copy(value: Any, made: dict[int, Any]) -> Any:
    if id(value) in made:
        return made[id(value)]
    if isinstance(value, _STATEFUL) or hasattr(value, "_task_runner"):
        return _state(value, made)
    if isinstance(value, MethodType):
        return MethodType(value.__func__, _copy(value.__self__, made))
    if isinstance(value, _SHARED) or callable(value):
        return value
    if isinstance(value, asyncio.Queue | asyncio.Event | asyncio.Lock):
        return type(value)()
    if type(value) in (list, tuple, set, frozenset, deque):
        return type(value)(_copy(item, made) for item in value)
    if type(value) is dict:
        return {key: _copy(item, made) for key, item in value.items()}
    return _plain(value, made)


def _state(value: Any, made: dict[int, Any]) -> Any:
    new: Any = object.__new__(type(value))
    made[id(value)] = new
    held = vars(value)
    renamed = (held[_TEAM_ID], str(uuid.uuid4())) if _TEAM_ID in held else None
    for name, item in held.items():
        new.__dict__[name] = _renamed(item, *renamed) if renamed else item
    for name, item in list(vars(new).items()):
        new.__dict__[name] = _copy(item, made)
    if renamed:
        new._initialized = new._is_running = False
        if new._embedded_runtime:
            new._runtime = SingleThreadedAgentRuntime(ignore_unhandled_exceptions=False)
    return new


def _renamed(value: Any, old: str, new: str) -> Any:
    """A team's id, in the names that were made from it."""
    if isinstance(value, str):
        return value.replace(old, new)
    if type(value) is list and all(isinstance(item, str) for item in value):
        return [item.replace(old, new) for item in value]
    return value


def _plain(value: Any, made: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, made)
    except Exception as error:
        raise WorkflowError(
            f"A team or agent that holds a {type(value).__name__} cannot be copied: {error}.",
            "Make the team in a function instead: @cotune.workflow async def solve(task): await make_team().run(...).",
        ) from error
