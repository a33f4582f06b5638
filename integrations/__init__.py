"""The outside world: one file per foreign system, which is imported nowhere else, and only once the application has."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Awaitable, Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from cotune.context import current_episode
from cotune.errors import CotuneError
from cotune.integrations.versions import require, unhooked

_INSTALL = {
    "openai._base_client": ("cotune.integrations.openai.sdk",),
    "openai.resources.responses.responses": ("cotune.integrations.openai.sockets",),
    "openai.resources.beta.responses.responses": ("cotune.integrations.openai.sockets",),
    "openai.resources.realtime.realtime": ("cotune.integrations.openai.sockets",),
    "openai.resources.beta.realtime.realtime": ("cotune.integrations.openai.sockets",),
    "langchain_core.runnables.config": ("cotune.integrations.langgraph.identity",),
    "langchain_core.language_models.chat_models": ("cotune.integrations.langchain.models",),
    "langgraph.pregel.main": ("cotune.integrations.langgraph.graphs",),
    "autogen_core": ("cotune.integrations.autogen.runtime",),
    "autogen_core.models": ("cotune.integrations.autogen.models",),
    "autogen_agentchat.agents": ("cotune.integrations.autogen.agents",),
    "autogen_agentchat.teams": ("cotune.integrations.autogen.teams",),
    "agents.run_internal.run_loop": ("cotune.integrations.openai.agents_sdk",),
    "langchain.agents.middleware.types": ("cotune.integrations.langchain.middleware",),
    "crewai": ("cotune.integrations.crewai.hooks",),
    "crewai.memory.unified_memory": ("cotune.integrations.crewai.memory",),
}
"""By foreign module: the integrations whose `install()` runs once that module is loaded."""

_REQUIRES = {
    "cotune.integrations.openai.sdk": ("openai",),
    "cotune.integrations.openai.sockets": ("openai",),
    "cotune.integrations.langgraph.identity": ("langchain-core", "langgraph"),
    "cotune.integrations.langchain.models": ("langchain-core",),
    "cotune.integrations.langchain.middleware": ("langchain-core",),
    "cotune.integrations.langgraph.graphs": ("langgraph",),
    "cotune.integrations.autogen.agents": ("autogen-agentchat", "autogen-core"),
    "cotune.integrations.autogen.teams": ("autogen-agentchat", "autogen-core"),
    "cotune.integrations.autogen.models": ("autogen-core",),
    "cotune.integrations.autogen.runtime": ("autogen-core",),
    "cotune.integrations.openai.agents_sdk": ("openai-agents",),
    "cotune.integrations.crewai.hooks": ("crewai",),
    "cotune.integrations.crewai.memory": ("crewai",),
}
"""By integration: the distributions whose installed version it must support."""

_waiting = dict(_INSTALL)
_refused: list[CotuneError] = []


def activate() -> None:
    """Install the integrations of all frameworks that are loaded, and of others as soon as they are. Idempotent.

    Raises UnsupportedVersion for a loaded framework that cannot be recorded.
    """
    for module in [name for name in _waiting if name in sys.modules]:
        _install(module)
    if _waiting and _WATCH not in sys.meta_path:
        sys.meta_path.insert(0, _WATCH)
    if _refused:
        raise _refused[0]


def graph_runner(app: object) -> Callable[[Any], Awaitable[Any]] | None:
    """How to run an application object that is no function: a coroutine function of its input, or None."""
    if any(base.__module__.startswith("langgraph.") for base in type(app).__mro__):
        from cotune.integrations.langgraph.identity import runner

        return runner(app)
    if any(base.__module__.startswith("autogen_agentchat.") for base in type(app).__mro__):
        from cotune.integrations.autogen.teams import runner as team_runner

        return team_runner(app)
    if any(base.__module__ == "agents.agent" for base in type(app).__mro__) and "agents.run_internal" in sys.modules:
        from cotune.integrations.openai.agents_sdk import runner as agent_runner

        return agent_runner(app)
    if any(base.__module__.startswith("crewai.") for base in (app if isinstance(app, type) else type(app)).__mro__):
        from cotune.integrations.crewai.hooks import runner as crew_runner

        return crew_runner(app)
    return None


def _install(module: str) -> None:
    """Never raises into the application's own import: `activate` raises what is refused, and the episode fails."""
    for name in _waiting.pop(module, ()):
        try:
            for distribution in _REQUIRES[name]:
                require(distribution)
            importlib.import_module(name).install()
        except CotuneError as error:
            _refuse(error)
        except (ImportError, AttributeError, KeyError, TypeError) as error:
            _refuse(unhooked(_REQUIRES[name], error))


def _refuse(error: CotuneError) -> None:
    _refused.append(error)
    episode = current_episode.get()
    if episode is not None:
        episode.fatal = error


class _Watch(importlib.abc.MetaPathFinder):
    """Finds nothing itself: it adds an installation to the loading of a module that integrations wait for."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _waiting:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        spec = next((s for f in others if (s := f.find_spec(name, path, target)) is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: importlib.abc.Loader) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        _install(module.__name__)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


_WATCH = _Watch()
