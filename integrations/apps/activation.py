"""Installs the integrations: at once for frameworks that are loaded, and for others as soon as they are.

`import cotune` does so, and so does every episode. A process that only works for cotune, such as an engine's, is
started with `NO_ACTIVATION` in its environment: importing a part of cotune there changes nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

from cotune.errors import CotuneError
from cotune.integrations.versions import require, unhooked
from cotune.recording.context import current_episode
from cotune.runtime.process_state import ProcessState

_SWITCH = "COTUNE_ACTIVATE"
NO_ACTIVATION = {_SWITCH: "0"}
"""Environment of a process in which `import cotune` installs nothing. An episode there still does."""

_PACKAGE = "cotune.integrations.apps."


class Framework(NamedTuple):
    """What there is to know of a framework before it is imported; the rest is in its folder."""

    folder: str
    needs: tuple[str, ...]
    """Distributions of which it must support the installed versions (`versions.SUPPORTED`)."""
    hooks: Mapping[str, str]
    """By foreign module: the module of the folder whose `install` hooks it once it is loaded, or `module:function`."""
    objects: str = ""
    """How the module of its application objects' classes begins, if it has objects that can be run."""
    runner: str = ""
    """The module of the folder whose `runner` runs them."""


FRAMEWORKS = (
    Framework(
        "openai",
        ("openai",),
        {
            "openai._base_client": "sdk",
            "openai.resources.responses.responses": "sdk:install_sockets",
            "openai.resources.beta.responses.responses": "sdk:install_sockets",
            "openai.resources.realtime.realtime": "sdk:install_sockets",
            "openai.resources.beta.realtime.realtime": "sdk:install_sockets",
        },
    ),
    Framework(
        "openai", ("openai-agents",), {"agents.run_internal.run_loop": "agents_sdk"}, "agents.agent", "agents_sdk"
    ),
    Framework(
        "langchain",
        ("langchain-core",),
        {
            "langchain_core.caches": "hooks:install_caches",
            "langchain_core.language_models.chat_models": "models",
            "langchain_core.tools.base": "hooks:install_tools",
            "langchain.agents.middleware.types": "hooks:install_middleware",
        },
    ),
    Framework(
        "langgraph",
        ("langchain-core", "langgraph"),
        {"langchain_core.runnables.config": "identity", "langgraph.pregel.main": "graphs"},
        "langgraph.",
        "identity",
    ),
    Framework("autogen", ("autogen-core",), {"autogen_core": "runtime", "autogen_core.models": "models"}),
    Framework(
        "autogen",
        ("autogen-agentchat", "autogen-core"),
        {"autogen_agentchat.agents": "agents", "autogen_agentchat.teams": "teams"},
        "autogen_agentchat.",
        "teams",
    ),
    Framework("crewai", ("crewai",), {"crewai": "hooks", "crewai.memory.unified_memory": "memory"}, "crewai.", "hooks"),
    Framework("dspy", (), {"dspy.clients.cache": "caches"}),
)
INTEGRATIONS = {
    module: (f"{framework.folder}.{hook}", framework.needs)
    for framework in FRAMEWORKS
    for module, hook in framework.hooks.items()
}
"""By foreign module: the function that hooks it, and the distributions that it needs."""

_QUIET = {
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "CREWAI_DISABLE_VERSION_CHECK": "true",
}


class Installations(ProcessState):
    """Which integrations are still to be installed, and which could not be."""

    def __init__(self) -> None:
        self.waiting = dict(INTEGRATIONS)
        self.refused: list[CotuneError] = []


_installations = Installations()


def activate() -> None:
    """Install the integrations of all frameworks that are loaded, and of others as soon as they are. Idempotent.

    Raises UnsupportedVersion for a loaded framework that cannot be recorded.
    """
    for module in [name for name in _installations.waiting if name in sys.modules]:
        _install(module)
    if _installations.waiting and _WATCH not in sys.meta_path:
        sys.meta_path.insert(0, _WATCH)
    if _installations.refused:
        raise _installations.refused[0]


def be_quiet() -> None:
    """Keep CrewAI from asking whether traces may be shared, for 20 seconds on a terminal, from its telemetry and its
    look for newer versions, in a process that runs a workflow. What the user has set stays."""
    if "crewai" in sys.modules:
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)


def activate_on_import() -> None:
    """What `import cotune` does: `activate`, unless the environment says `COTUNE_ACTIVATE=0`.

    What is refused is raised by the first episode instead.
    """
    if os.environ.get(_SWITCH) == NO_ACTIVATION[_SWITCH]:
        return
    with contextlib.suppress(CotuneError):
        activate()


def graph_runner(app: object) -> Callable[[Any], Awaitable[Any]] | None:
    """How to run an application object that is no function: a coroutine function of its input, or None."""
    for base in (app if isinstance(app, type) else type(app)).__mro__:
        for framework in FRAMEWORKS:
            if framework.objects and base.__module__.startswith(framework.objects):
                module = importlib.import_module(f"{_PACKAGE}{framework.folder}.{framework.runner}")
                found: Callable[[Any], Awaitable[Any]] | None = module.runner(app)
                return found
    return None


def _install(module: str) -> None:
    """Never raises into the application's own import: `activate` raises what is refused, and the episode fails."""
    name, distributions = _installations.waiting.pop(module, ("", ()))
    if not name:
        return
    try:
        for distribution in distributions:
            require(distribution)
        integration, _, function = name.partition(":")
        getattr(importlib.import_module(_PACKAGE + integration), function or "install")()
    except CotuneError as error:
        _refuse(error)
    except (ImportError, AttributeError, KeyError, TypeError) as error:
        _refuse(unhooked(distributions, error))


def _refuse(error: CotuneError) -> None:
    _installations.refused.append(error)
    episode = current_episode.get()
    if episode is not None:
        episode.fatal = error


class _Watch(importlib.abc.MetaPathFinder):
    """Finds nothing itself: it adds an installation to the loading of a module that integrations wait for."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _installations.waiting:
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
