"""The public names, each as mkdocstrings shows it: signature and docstring."""

from __future__ import annotations

import inspect

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
    rows = [f"| `{name}` | {_said(getattr(module, name))} |" for name in names]
    return "\n".join(["| name | what it is |", "|---|---|", *rows])


def _said(what: object) -> str:
    first = (inspect.getdoc(what) or "").partition("\n\n")[0]
    return prose(first.partition(". ")[0].rstrip(".")).replace("|", "\\|")


def _shown(module: str, names: list[str]) -> str:
    return "\n\n".join(f"::: {module}.{name}" for name in names)
