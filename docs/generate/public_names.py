"""The public names, each as mkdocstrings shows it: signature and docstring."""

from __future__ import annotations

import importlib
import inspect
import re

from wording import prose

import cotune
import cotune.types


def functions() -> str:
    """The names of `cotune`."""
    return _shown("cotune", sorted(cotune.__all__, key=str.lower))


def types() -> str:
    """The names of `cotune.types`; the fields of a TrainConfig have a page of their own."""
    return _shown("cotune.types", cotune.types.__all__).replace(
        "::: cotune.types.TrainConfig", "::: cotune.types.TrainConfig\n    options: {members: false}"
    )


def function_table() -> str:
    """The names of `cotune`, each with what it does in a sentence."""
    return _table(cotune, sorted(cotune.__all__, key=str.lower))


def type_table() -> str:
    """The same for the names of `cotune.types`."""
    return _table(cotune.types, cotune.types.__all__)


def _table(module: object, names: list[str]) -> str:
    rows = [f"| `{name}` | {_said(name, getattr(module, name))} |" for name in names]
    return "\n".join(["| name | what it is |", "|---|---|", *rows])


def _of_alias(name: str) -> str:
    """The text below a type alias of `cotune.types`, in the module that defines it."""
    (module,) = re.findall(rf"^from (\S+) import .*\b{name}\b", inspect.getsource(cotune.types), re.MULTILINE)
    found = re.search(
        rf'^{name} = [^\n]+\n"""(.+?)"""', inspect.getsource(importlib.import_module(module)), re.M | re.S
    )
    assert found, name
    return found[1]


def _said(name: str, what: object) -> str:
    text = (inspect.getdoc(what) or "") if inspect.isroutine(what) or inspect.isclass(what) else _of_alias(name)
    first = text.partition("\n\n")[0]
    return prose(first.partition(". ")[0].rstrip(".")).replace("|", "\\|")


def _shown(module: str, names: list[str]) -> str:
    return "\n\n".join(f"::: {module}.{name}" for name in names)
