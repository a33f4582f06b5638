"""Tracks the policy versions that an engine serves: which requests may use a version, and when it can be freed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from cotune.errors import RequestRefused
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import Weights, fingerprint

BASE = PolicyRef("base")
"""The name of the model without any published weights."""


@dataclass(eq=False)
class Version:
    """A published version. `target` is the engine's handle of it; `running` counts its unfinished requests."""

    policy: PolicyRef
    fingerprint: str
    target: Any = None
    running: int = 0
    retired: bool = False


class Versions:
    """Versions in the order of publishing, including retired ones with unfinished requests.

    `base` answers for every unpublished policy at version 0; None to refuse these. `lock` is held while versions are
    published or retired.
    """

    def __init__(self, base: Any = None) -> None:
        self.base: Version | None = Version(BASE, "", base)
        self.lock = asyncio.Lock()
        self._versions: dict[str, Version] = {}

    def all(self) -> list[Version]:
        return list(self._versions.values())

    def served(self) -> dict[str, str]:
        """Fingerprints of the versions that new requests may use."""
        return {key: version.fingerprint for key, version in self._versions.items() if not version.retired}

    def known(self, policy: PolicyRef, weights: Weights) -> str | None:
        """The fingerprint of a policy that is served with these weights already; None for an unknown version.

        Raises RequestRefused for other weights under the same version.
        """
        version = self._versions.get(str(policy))
        if version is None:
            return None
        if not version.retired and version.fingerprint == fingerprint(weights):
            return version.fingerprint
        raise RequestRefused(f"{policy} was published before with other weights.", "Publish under a new version.")

    def add(self, version: Version) -> None:
        self._versions[str(version.policy)] = version

    def locate(self, policy: PolicyRef) -> Version:
        """The version that answers a new request. Raises RequestRefused for one that is not served."""
        version = self._versions.get(str(policy))
        if version is None and policy.version == 0:
            version = self.base
        if version is not None and not version.retired:
            return version
        base = " and every unpublished policy at version 0" if self.base is not None else ""
        raise RequestRefused(
            f"{policy} is not served; served are {sorted(self.served())}{base}.",
            "Publish this version before sampling from it.",
        )

    def left(self, version: Version) -> bool:
        """Note that a request of this version has ended. Returns whether the version can be freed now."""
        version.running -= 1
        return version.retired and not version.running

    def retire(self, policy: PolicyRef) -> Version:
        """Refuse new requests. Raises RequestRefused for a version that is not served."""
        version = self._versions.get(str(policy))
        if version is None or version.retired:
            raise RequestRefused(f"{policy} is not served, so it cannot be retired.", "Retire what was published.")
        version.retired = True
        return version

    def holds(self, version: Version) -> bool:
        """Whether it was neither forgotten nor replaced."""
        return self._versions.get(str(version.policy)) is version

    def forget(self, version: Version) -> None:
        self._versions.pop(str(version.policy), None)

    def clear(self) -> list[Version]:
        """Refuse all versions from now on, including the base, and return them."""
        versions = list(self._versions.values())
        if self.base is not None:
            versions.append(self.base)
        self.base = None
        self._versions.clear()
        return versions
