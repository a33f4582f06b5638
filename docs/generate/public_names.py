"""The public names, each as mkdocstrings shows it: signature and docstring."""

from __future__ import annotations

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


def _shown(module: str, names: list[str]) -> str:
    return "\n\n".join(f"::: {module}.{name}" for name in names)
