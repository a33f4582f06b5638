"""Copies an AutoGen team or agent, so that episodes with the same object neither wait for nor see each other.

Objects with the state of a conversation are copied: agents, teams, contexts, memories, termination conditions. Model
clients, tools, functions and runtimes are shared, and so are messages, which do not change.
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


def copy_application(app: Any) -> Any:
    """A copy of an agent or team in its present state. Raises WorkflowError if it cannot be copied."""
    return _copy(app, {})


def _copy(value: Any, copies: dict[int, Any]) -> Any:
    """Copy a value of the application with the objects in it, as far as they keep the state of a conversation. Other
    objects are shared.

    `copies` maps the id of an original to its copy, so that an object with two references to it is copied once.
    """
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, _STATEFUL) or hasattr(value, "_task_runner"):
        return _copy_state(value, copies)
    if isinstance(value, MethodType):
        return MethodType(value.__func__, _copy(value.__self__, copies))
    if isinstance(value, _SHARED) or callable(value):
        return value
    if isinstance(value, asyncio.Queue | asyncio.Event | asyncio.Lock):
        # It belongs to an event loop and cannot be copied: the copy starts with a new one.
        return type(value)()
    if type(value) in (list, tuple, set, frozenset, deque):
        return type(value)(_copy(item, copies) for item in value)
    if type(value) is dict:
        return {key: _copy(item, copies) for key, item in value.items()}
    return _deepcopy(value, copies)


def _copy_state(value: Any, copies: dict[int, Any]) -> Any:
    """Copy an agent, team or other object with state, attribute by attribute. A team gets a new id."""
    new: Any = object.__new__(type(value))
    # Registered before its attributes are copied: an attribute may refer back to the object.
    copies[id(value)] = new
    attributes = vars(value)
    is_team = _TEAM_ID in attributes
    if is_team:
        old_id = attributes[_TEAM_ID]
        new_id = str(uuid.uuid4())
        for name, item in attributes.items():
            new.__dict__[name] = _replace_team_id(item, old_id, new_id)
    else:
        new.__dict__.update(attributes)
    for name, item in list(vars(new).items()):
        new.__dict__[name] = _copy(item, copies)
    if is_team:
        # A runtime is shared, but not the one that a team has created for itself: it belongs to the team's run.
        new._initialized = False
        new._is_running = False
        if new._embedded_runtime:
            new._runtime = SingleThreadedAgentRuntime(ignore_unhandled_exceptions=False)
    return new


def _replace_team_id(value: Any, old: str, new: str) -> Any:
    """A value with the new id of a team; the old id may be a part of names."""
    if isinstance(value, str):
        return value.replace(old, new)
    if type(value) is list and all(isinstance(item, str) for item in value):
        return [item.replace(old, new) for item in value]
    return value


def _deepcopy(value: Any, copies: dict[int, Any]) -> Any:
    """Copy an object of an unknown class with `copy.deepcopy`. Raises WorkflowError if that fails."""
    try:
        return copy.deepcopy(value, copies)
    except Exception as error:
        raise WorkflowError(
            f"A team or agent that holds a {type(value).__name__} cannot be copied: {error}.",
            "Make the team in a function instead: @cotune.workflow async def solve(task): await make_team().run(...).",
        ) from error
