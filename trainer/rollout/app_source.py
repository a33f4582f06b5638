"""The source of an application for other processes: its import path, never the object itself."""

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
"""Patterns of environment variables that every worker gets from the driver."""

_REMEDY = 'Put it into a module of its own and pass "module:name", or path/to/file.py:name.'


class AppSource(msgspec.Struct, frozen=True, kw_only=True):
    """The import path of the workflow, and the settings of a worker's process before it imports the workflow."""

    path: str
    """`module:attribute` or `path/to/file.py:attribute`; a relative path starts in the working folder."""
    folder: str | None = None
    """Working folder of the driver. A worker on a machine without this folder does not change its own."""
    sys_path: tuple[str, ...] = ()
    env: dict[str, str] = {}
    redact: str = ""
    keep_token_ids: bool = False
    roles_by: str = ""
    prompts: Prompts | None = None

    def load(self) -> Workflow:
        """Set up this process like the driver and import the workflow. Raises ConfigError, WorkflowError."""
        os.environ.update(self.env)
        if self.folder is not None and Path(self.folder).is_dir():
            os.chdir(self.folder)
        from_driver = [entry for entry in self.sys_path if Path(entry).exists()]
        sys.path[:] = [*from_driver, *(entry for entry in sys.path if entry not in from_driver)]
        workflow = load_workflow(self.path).redacted(self.redact, keep_token_ids=self.keep_token_ids)
        return workflow.named_by(self.roles_by).prompted(self.prompts)


def app_source(path: str, config: TrainConfig, prompts: Prompts | None = None) -> AppSource:
    """Return the source of the workflow at the import path `path`, with this process's folder, import paths and
    environment, and with these edited prompts.

    A `working_dir` in `cluster.runtime_env` replaces the folder of this process. A relative path then starts there.
    """
    has_working_dir = "working_dir" in config.cluster.runtime_env
    return AppSource(
        path=path,
        folder=None if has_working_dir else str(Path.cwd()),
        sys_path=tuple(_import_paths(has_working_dir)),
        env={**_environment(), **config.cluster.env},
        redact=config.redact,
        keep_token_ids=config.keep_token_ids,
        roles_by=config.roles_by,
        prompts=prompts,
    )


def import_path(workflow: Workflow) -> str:
    """Return the module and name, or the file and name, under which `workflow` can be imported. Raises ConfigError."""
    name_in_main = ""
    for module, name in _find_in_modules(workflow):
        # Other processes cannot import "__main__" by this name, but its file.
        if module.__name__ != "__main__":
            return f"{module.__name__}:{name}"
        if file := getattr(module, "__file__", None):
            path = Path(file).resolve()
            if path.is_relative_to(Path.cwd()):
                path = path.relative_to(Path.cwd())
            name_in_main = f"{path}:{name}"
    if name_in_main:
        return name_in_main
    code = getattr(workflow.fn, "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    raise ConfigError("workflow", f"{workflow.name}{where}", "cannot be imported by rollout workers", _REMEDY)


def _find_in_modules(workflow: Workflow) -> Iterator[tuple[types.ModuleType, str]]:
    """Yield each module that has the workflow as an attribute, and the name of this attribute."""
    defining_module = getattr(workflow.fn, "__module__", "")
    modules = [module for module in list(sys.modules.values()) if isinstance(module, types.ModuleType)]
    # The module that defines the workflow comes first. Other modules may have imported it, for example tests.
    for module in sorted(modules, key=lambda module: module.__name__ != defining_module):
        for name, value in list(vars(module).items()):
            # type() instead of isinstance(): a module may have objects that pretend to have any attribute or class.
            candidate = value
            if type(value) is types.FunctionType:  # a decorated function carries its workflow
                candidate = vars(value).get("cotune")
            # The workflow of this run may be a copy with other settings, so the functions are compared.
            if type(candidate) is Workflow and candidate.fn is workflow.fn:
                yield module, name


def _environment() -> dict[str, str]:
    """Return the environment variables of this process that match `PASSED_ON`."""
    variables: dict[str, str] = {}
    for name, value in os.environ.items():
        if any(fnmatch.fnmatch(name, pattern) for pattern in PASSED_ON):
            variables[name] = value
    return variables


def _import_paths(has_working_dir: bool) -> Iterator[str]:
    """Yield the absolute import paths of this process. If workers have a working folder of their own, the folder of
    this process is left out."""
    folder = Path.cwd()
    for entry in dict.fromkeys(str(Path(entry or ".").resolve()) for entry in sys.path):
        if not (has_working_dir and folder == Path(entry)):
            yield entry
