"""Installs the integration of each framework: at once if it is loaded, otherwise when the application imports it.

`import cotune` and every episode activate the integrations. cotune starts its own processes, for example engines, with
`NO_ACTIVATION` in the environment: importing cotune changes nothing there.
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
from cotune.integrations.versions import hooks_failed, require_version
from cotune.recording.context import current_episode
from cotune.runtime.process_state import ProcessState

_SWITCH = "COTUNE_ACTIVATE"
NO_ACTIVATION = {_SWITCH: "0"}
"""Environment variables that keep `import cotune` from installing integrations. An episode still installs them."""

_PACKAGE = "cotune.integrations.apps."


class Framework(NamedTuple):
    """Facts on a framework that are needed before it is imported. Its folder has the rest."""

    folder: str
    needs: tuple[str, ...]
    """Distributions whose installed versions must be supported (`versions.SUPPORTED`)."""
    hooks: Mapping[str, str]
    """Module of the framework -> module in the folder whose `install` hooks it once loaded, or `module:function`."""
    objects: str = ""
    """Prefix of the module of classes whose objects can be run as an application; empty without any."""
    runner: str = ""
    """Module in the folder whose `runner` runs these objects."""


FRAMEWORKS = (
    Framework(
        "openai",
        ("openai",),
        {
            "openai._base_client": "sdk",
            "openai.resources.chat.completions.completions": "answer_models:install_chat",
            "openai.resources.responses": "answer_models:install_responses",
            "openai.resources.beta.responses": "answer_models:install_beta_responses",
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
INTEGRATIONS: dict[str, tuple[str, tuple[str, ...]]] = {}
"""Module of a framework -> the function that hooks it, and the distributions that it needs."""
for _framework in FRAMEWORKS:
    for _module, _hook in _framework.hooks.items():
        INTEGRATIONS[_module] = (f"{_framework.folder}.{_hook}", _framework.needs)

_QUIET = {
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "CREWAI_DISABLE_VERSION_CHECK": "true",
}


class Installations(ProcessState):
    """Integrations that wait for their framework, and errors of the ones that could not be installed."""

    def __init__(self) -> None:
        self.waiting = dict(INTEGRATIONS)
        self.refused: list[CotuneError] = []


_installations = Installations()


def activate() -> None:
    """Install the integrations of all loaded frameworks now, and of others when they are imported. Idempotent.

    Raises UnsupportedVersion for a loaded framework that cannot be recorded.
    """
    for module in [name for name in _installations.waiting if name in sys.modules]:
        _install(module)
    if _installations.waiting and _WATCH not in sys.meta_path:
        sys.meta_path.insert(0, _WATCH)
    if _installations.refused:
        raise _installations.refused[0]


def be_quiet() -> None:
    """Turn off CrewAI's telemetry, its check for newer versions, and its 20-second question on sharing traces.

    For processes that run a workflow. Variables that the user has set are not changed.
    """
    if "crewai" in sys.modules:
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)


def activate_on_import() -> None:
    """Activate the integrations on `import cotune`, unless the environment has `COTUNE_ACTIVATE=0`.

    The import raises no error for an unsupported framework; the first episode does.
    """
    if os.environ.get(_SWITCH) == NO_ACTIVATION[_SWITCH]:
        return
    with contextlib.suppress(CotuneError):
        activate()


def graph_runner(app: object) -> Callable[[Any], Awaitable[Any]] | None:
    """A coroutine function that runs an object of a framework (a graph, a team, a crew) on its input.

    None for an object of no known framework.
    """
    cls = app if isinstance(app, type) else type(app)
    for base in cls.__mro__:
        for framework in FRAMEWORKS:
            if framework.objects and base.__module__.startswith(framework.objects):
                module = importlib.import_module(f"{_PACKAGE}{framework.folder}.{framework.runner}")
                run: Callable[[Any], Awaitable[Any]] | None = module.runner(app)
                return run
    return None


def _install(module: str) -> None:
    """Install the integration that waits for `module`.

    An error must not break the application's import: it fails the present episode, and `activate` raises it later.
    """
    hook, distributions = _installations.waiting.pop(module, ("", ()))
    if not hook:
        return
    try:
        for distribution in distributions:
            require_version(distribution)
        integration_name, _, function = hook.partition(":")
        integration = importlib.import_module(_PACKAGE + integration_name)
        install = getattr(integration, function or "install")
        install()
    except CotuneError as error:
        _refuse(error)
    except (ImportError, AttributeError, KeyError, TypeError) as error:
        _refuse(hooks_failed(distributions, error))


def _refuse(error: CotuneError) -> None:
    _installations.refused.append(error)
    episode = current_episode.get()
    if episode is not None:
        episode.fatal = error


class _Watch(importlib.abc.MetaPathFinder):
    """Installs an integration after its module is loaded. It finds modules by asking the other finders."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find the module through the other finders, with a loader that installs its integration after loading."""
        if name not in _installations.waiting:
            return None
        for finder in list(sys.meta_path):  # a copy: a finder may change the list
            if finder is self:
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


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
