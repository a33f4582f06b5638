"""What the installed vLLM can do, read without importing it: an import takes ten seconds or more."""

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
    """What the installed vLLM was built for; empty if it is not installed."""
    try:
        return build_of(version("vllm"))
    except PackageNotFoundError:
        return ""


def build_of(version: str) -> Build:
    """What a vLLM of this version was built for: builds for the CPU say so, as in 0.28.0+cpu."""
    if not version:
        return ""
    return "cpu" if "cpu" in version.partition("+")[2] else "gpu"


def unknown_architectures(folders: Iterable[Path]) -> tuple[str, ...]:
    """Architectures of the models in `folders` that the installed vLLM does not list; empty if its list is not found.

    vLLM runs some of the others through transformers, but more slowly and not all of them.
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
        architectures = (
            json.loads(config.read_text(encoding="utf-8")).get("architectures") if config.is_file() else None
        )
        for name in architectures or ():
            # A row is `"Name": ("module", "Class")`; models that vLLM has dropped are listed as `"Name": "0.9.2"`.
            if not re.search(rf'"{re.escape(name)}":\s*\(', listed):
                unknown.append(name)
    return tuple(dict.fromkeys(unknown))
