"""Versions of the foreign packages that the integrations are tested with, and the refusal of any other."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from cotune.errors import CotuneError

SUPPORTED: dict[str, tuple[str, str]] = {
    "openai": ("2.45", "4"),
    "langchain-core": ("1.3", "2"),
    "langgraph": ("1.1", "2"),
    "autogen-agentchat": ("0.7", "0.8"),
    "autogen-core": ("0.7", "0.8"),
    "openai-agents": ("0.18.3", "1"),
    "crewai": ("1.15.29", "2"),
    "vllm": ("0.28", "0.33"),
    "ray": ("2.49", "3"),
}
"""By distribution: the oldest version that is supported, and the first that is not any more."""

_RUNS = ("vllm", "ray")
"""What cotune runs on; the others it records."""


_version_once = functools.cache(version)
"""Reads a distribution's metadata once, which takes 5 to 15 ms: a process may start many runs."""


class UnsupportedVersion(CotuneError):
    """A package is installed in a version that is not supported; recording a framework anyway would lose calls."""


def require(distribution: str) -> str:
    """The installed version of a framework, or "" where it has no distribution (a vendored copy).

    Raises UnsupportedVersion when it is older or newer than what is supported.
    """
    try:
        found = version(distribution)
    except PackageNotFoundError:
        return ""
    check(distribution, found)
    return found


def refusal(distribution: str) -> UnsupportedVersion | None:
    """Why the installed version of a distribution is not supported; None where it is, or where any is."""
    try:
        if distribution in SUPPORTED:
            require(distribution)
    except UnsupportedVersion as error:
        return error
    return None


def installed(distributions: Iterable[str]) -> dict[str, str]:
    """The versions of those that are installed."""
    found = {}
    for name in distributions:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = _version_once(name)
    return found


def check(distribution: str, found: str) -> None:
    """Raises UnsupportedVersion when `found` is older or newer than what is supported."""
    oldest, beyond = SUPPORTED[distribution]
    if not _release(oldest) <= _release(found) < _release(beyond):
        raise UnsupportedVersion(
            f"{distribution} {found} cannot be {'used' if distribution in _RUNS else 'recorded'}: supported is "
            f">= {oldest} and < {beyond}.",
            f"Install a supported version: pip install '{distribution}>={oldest},<{beyond}'.",
        )


def require_hooks(distribution: str, owner: Any, *names: str) -> None:
    """Raises UnsupportedVersion unless a class or module itself has all these functions, which are to be hooked."""
    for name in names:
        if not callable(vars(owner).get(name)):
            raise UnsupportedVersion(
                f"{distribution} {version(distribution)} has no {owner.__name__.rpartition('.')[2]}.{name}, which "
                "cotune records it by.",
                f"Install a version of {distribution} that docs/reference/versions.md names.",
            )


def unhooked(distributions: Sequence[str], error: Exception) -> UnsupportedVersion:
    """The error for a framework whose private parts are not as they were, though its version is in the range."""
    found = ", ".join(f"{name} {version(name)}" for name in distributions)
    refused = UnsupportedVersion(
        f"{found} is not built as cotune knows it: {type(error).__name__}: {error}.",
        "Install versions that docs/reference/versions.md lists as tested.",
    )
    refused.__cause__ = error
    return refused


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])
