"""How an application gets into another process: by its import path, never as an object."""

from __future__ import annotations

import fnmatch
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import msgspec

from cotune.config.train import TrainConfig
from cotune.episodes.workflows import Workflow, load_workflow
from cotune.errors import ConfigError
from cotune.prompts.edits import Prompts

PASSED_ON = (
    "OPENAI_*",
    "AZURE_*",
    "ANTHROPIC_*",
    "GOOGLE_*",
    "GEMINI_*",
    "LANGCHAIN*",
    "LANGGRAPH*",
    "LANGSMITH*",
    "AUTOGEN*",
    "CREWAI*",
    "OTEL_*",
    "HF_*",
    "TOKENIZERS_PARALLELISM",
    "*_PROXY",
    "*_proxy",
)
"""Environment variables that every worker gets from the driver."""

_REMEDY = 'Put it into a module of its own and pass "module:name", or path/to/file.py:name.'


class AppSource(msgspec.Struct, frozen=True, kw_only=True):
    """Where a worker finds the workflow, and what must be set before it is imported."""

    path: str
    """`module:attribute` or `path/to/file.py:attribute`; a relative one starts in the working folder."""
    folder: str | None = None
    """Working folder of the driver; a worker on a machine without it stays where it is."""
    sys_path: tuple[str, ...] = ()
    env: dict[str, str] = {}
    redact: str = ""
    keep_token_ids: bool = False
    roles_by: str = ""
    prompts: Prompts | None = None

    def load(self) -> Workflow:
        """Make this process like the driver and import the workflow. Raises ConfigError, WorkflowError."""
        os.environ.update(self.env)
        if self.folder is not None and Path(self.folder).is_dir():
            os.chdir(self.folder)
        known = [entry for entry in self.sys_path if Path(entry).exists()]
        sys.path[:] = [*known, *(entry for entry in sys.path if entry not in known)]
        found = load_workflow(self.path).redacted(self.redact, keep_token_ids=self.keep_token_ids)
        return found.named_by(self.roles_by).prompted(self.prompts)


def app_source(path: str, config: TrainConfig, prompts: Prompts | None = None) -> AppSource:
    """How other processes find the workflow at the import path `path`, as this process stands; `prompts` are its edited
    ones.

    A `working_dir` in `cluster.runtime_env` replaces the folder of this process, and a relative path then starts there.
    """
    own_folder = "working_dir" in config.cluster.runtime_env
    return AppSource(
        path=path,
        folder=None if own_folder else str(Path.cwd()),
        sys_path=tuple(_entries(own_folder)),
        env={**_passed_on(), **config.cluster.env},
        redact=config.redact,
        keep_token_ids=config.keep_token_ids,
        roles_by=config.roles_by,
        prompts=prompts,
    )


def import_path(workflow: Workflow) -> str:
    """The module and name, or the file and name, under which `workflow` is found. Raises ConfigError."""
    main = ""
    for module, name in _names(workflow):
        if module.__name__ != "__main__":
            return f"{module.__name__}:{name}"
        if file := getattr(module, "__file__", None):
            path = Path(file).resolve()
            main = f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{name}"
    if main:
        return main
    code = getattr(workflow.fn, "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    raise ConfigError("workflow", f"{workflow.name}{where}", "cannot be imported by rollout workers", _REMEDY)


def _names(workflow: Workflow) -> Iterator[tuple[types.ModuleType, str]]:
    home = getattr(workflow.fn, "__module__", "")
    modules = [module for module in list(sys.modules.values()) if isinstance(module, types.ModuleType)]
    # The module that defines it first: others may have imported it, such as an application's tests.
    for module in sorted(modules, key=lambda module: module.__name__ != home):
        for name, value in list(vars(module).items()):
            # By type(), as a module may hold objects that answer to any name, isinstance() included.
            held = vars(value).get("cotune") if type(value) is types.FunctionType else value
            if type(held) is Workflow and held.fn is workflow.fn:
                yield module, name


def _passed_on() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if any(fnmatch.fnmatch(name, p) for p in PASSED_ON)}


def _entries(own_folder: bool) -> Iterator[str]:
    """What this process imports from, absolute; without what a folder of the worker's own replaces."""
    here = Path.cwd()
    for entry in dict.fromkeys(str(Path(entry or ".").resolve()) for entry in sys.path):
        if not (own_folder and here == Path(entry)):
            yield entry
