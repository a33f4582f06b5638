"""The abilities of the installed vLLM, read from its files. To import vLLM takes ten seconds or more."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

Build = Literal["", "cpu", "gpu"]

_REGISTRY = Path("model_executor", "models", "registry.py")
"""The file in vLLM's package that lists the architectures."""


def vllm_build() -> Build:
    """The device for which the installed vLLM was built; empty if it is not installed."""
    try:
        return build_of(version("vllm"))
    except PackageNotFoundError:
        return ""


def build_of(version: str) -> Build:
    """The device for which a vLLM with this version was built. The versions of CPU builds name it: 0.28.0+cpu."""
    if not version:
        return ""
    return "cpu" if "cpu" in version.partition("+")[2] else "gpu"


def unknown_architectures(folders: Iterable[Path]) -> tuple[str, ...]:
    """Architectures of the models in `folders` that the installed vLLM does not list; empty if its list is not found.

    vLLM can run some unlisted architectures with transformers, but more slowly.
    """
    package = importlib.util.find_spec("vllm")
    if package is None or package.origin is None:
        return ()
    registry = Path(package.origin).parent / _REGISTRY
    if not registry.is_file():
        return ()
    listed = registry.read_text(encoding="utf-8")
    unknown: list[str] = []
    for folder in folders:
        config = folder / "config.json"
        if not config.is_file():
            continue
        for name in json.loads(config.read_text(encoding="utf-8")).get("architectures") or ():
            # A row is `"Name": ("module", "Class")`. Rows of models that vLLM no longer has are `"Name": "0.9.2"`.
            if not re.search(rf'"{re.escape(name)}":\s*\(', listed):
                unknown.append(name)
    return tuple(dict.fromkeys(unknown))
