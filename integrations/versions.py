"""Versions of the foreign packages that the integrations are tested with.

An older version is refused, and so is a newer major version: recording through hooks that have moved would lose calls.
A newer version within the tested major version is used with a warning; hooks that it lacks are still refused by name.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from cotune.errors import CotuneError
from cotune.runtime.warn_once import warn_once

ALLOW_UNTESTED = "COTUNE_UNTESTED"
"""The environment variable that allows a newer major version, if it is "1"."""


class VersionRange(NamedTuple):
    """The oldest and the newest version that the tests ran with; `newest` includes its patch releases."""

    oldest: str
    newest: str

    @property
    def next_major(self) -> str:
        return str(_release(self.newest)[0] + 1)

    def __str__(self) -> str:
        return f"{self.oldest} to {self.newest}.x"


SUPPORTED: dict[str, VersionRange] = {
    "openai": VersionRange("2.45", "3.57"),
    "langchain-core": VersionRange("1.3", "1.8"),
    "langgraph": VersionRange("1.1", "1.2"),
    "autogen-agentchat": VersionRange("0.7", "0.7"),
    "autogen-core": VersionRange("0.7", "0.7"),
    "openai-agents": VersionRange("0.18.3", "0.24"),
    "crewai": VersionRange("1.15.29", "1.15"),
    "vllm": VersionRange("0.28", "0.32"),
    "ray": VersionRange("2.49", "2.60"),
}
"""By distribution. docs/reference/versions.md shows the ranges and the tests that ran."""

_RUNS = ("vllm", "ray")
"""cotune runs on these; it records the others."""


_version_once = functools.cache(version)
"""Reads a distribution's metadata once, which takes 5 to 15 ms: a process may start many runs."""


class UnsupportedVersion(CotuneError):
    """A package is installed in a version that is not supported; recording a framework anyway would lose calls."""


def require_version(distribution: str) -> str:
    """The installed version of a framework, or "" if it has no distribution (a vendored copy).

    Raises UnsupportedVersion as `check` does.
    """
    try:
        installed_version = version(distribution)
    except PackageNotFoundError:
        return ""
    check(distribution, installed_version)
    return installed_version


def check(distribution: str, installed_version: str) -> None:
    """Warn, once a process, about a version that is newer than the tested ones.

    Raises UnsupportedVersion if it is older than the tested ones, or of a newer major version that COTUNE_UNTESTED=1
    does not allow.
    """
    refused = version_refusal(distribution, installed_version)
    if refused is not None:
        raise refused
    if is_untested(distribution, installed_version):
        warn_once(
            f"untested {distribution} {installed_version}",
            "%s %s is newer than the versions that cotune is tested with (%s). If calls are missing or fail, install "
            "one of those.",
            distribution,
            installed_version,
            SUPPORTED[distribution],
        )


def is_untested(distribution: str, installed_version: str) -> bool:
    """Whether a version is newer than those that the tests ran with."""
    newest = _release(SUPPORTED[distribution].newest)
    return _release(installed_version)[: len(newest)] > newest


def version_refusal(distribution: str, installed_version: str) -> UnsupportedVersion | None:
    """The error for a version that is not supported; None if it is, or if `SUPPORTED` does not list the distribution.
    Unlike `check` this neither warns nor raises."""
    tested = SUPPORTED.get(distribution)
    if tested is None:
        return None
    release = _release(installed_version)
    is_older = release < _release(tested.oldest)
    is_untested_major = release[0] > _release(tested.newest)[0] and os.environ.get(ALLOW_UNTESTED) != "1"
    if not is_older and not is_untested_major:
        return None
    use = "used" if distribution in _RUNS else "recorded"
    remedy = f"Install a supported version: pip install '{distribution}>={tested.oldest},<{tested.next_major}'"
    return UnsupportedVersion(
        f"{distribution} {installed_version} cannot be {use}: tested is {tested}.",
        f"{remedy}." if is_older else f"{remedy}, or try this one with {ALLOW_UNTESTED}=1.",
    )


def versions_of_installed(distributions: Iterable[str]) -> dict[str, str]:
    """The versions of the distributions that are installed."""
    versions = {}
    for name in distributions:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = _version_once(name)
    return versions


def require_hooks(distribution: str, owner: Any, *names: str) -> None:
    """Raises UnsupportedVersion unless a class or module itself has all these functions, which are to be hooked."""
    for name in names:
        if not callable(vars(owner).get(name)):
            raise UnsupportedVersion(
                f"{distribution} {version(distribution)} has no {owner.__name__.rpartition('.')[2]}.{name}, which "
                "cotune records it by.",
                f"Install a version of {distribution} that docs/reference/versions.md names.",
            )


def hooks_failed(distributions: Sequence[str], error: Exception) -> UnsupportedVersion:
    """The error for a framework whose private parts are not as they were, though its version is in the range."""
    installed_versions = ", ".join(f"{name} {version(name)}" for name in distributions)
    refused = UnsupportedVersion(
        f"{installed_versions} is not built as cotune knows it: {type(error).__name__}: {error}.",
        "Install versions that docs/reference/versions.md lists as tested.",
    )
    refused.__cause__ = error
    return refused


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])
