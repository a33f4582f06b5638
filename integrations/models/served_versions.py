"""The policy versions that an engine serves: which requests may use one, and when it is free to go."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from cotune.errors import RequestRefused
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import Weights, fingerprint

BASE = PolicyRef("base")
"""What the model without any published weights is called."""


@dataclass(eq=False)
class Version:
    """A published version. `target` is what the engine knows it by; `running` counts its unfinished requests."""

    policy: PolicyRef
    fingerprint: str
    target: Any = None
    running: int = 0
    retired: bool = False


class Versions:
    """Versions in the order of publishing, retired ones with unfinished requests included.

    `base` answers for every unpublished policy at version 0 (None: nothing does). `lock` is held while versions come or
    go.
    """

    def __init__(self, base: Any = None) -> None:
        self.base: Version | None = Version(BASE, "", base)
        self.lock = asyncio.Lock()
        self._versions: dict[str, Version] = {}

    def all(self) -> list[Version]:
        return list(self._versions.values())

    def served(self) -> dict[str, str]:
        """Fingerprints of what new requests may ask for."""
        return {key: version.fingerprint for key, version in self._versions.items() if not version.retired}

    def known(self, policy: PolicyRef, weights: Weights) -> str | None:
        """The fingerprint where exactly this is served already, None where nothing is known of it. Raises
        RequestRefused for other weights under the same version."""
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
        """A request of this version has ended; whether the version is now free to go."""
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
        """Refuse all that is served, the base included; returns it."""
        old = [*self._versions.values(), *([self.base] if self.base else [])]
        self.base = None
        self._versions.clear()
        return old
