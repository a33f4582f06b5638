"""What a router has published: the weights that a restarted engine must be given again, and who still uses them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from cotune.errors import RequestRefused
from cotune.policies import LoraSpec
from cotune.recording.records import PolicyRef
from cotune.sampling.protocol import Weights


class Version(msgspec.Struct, frozen=True):
    """One published version; `fingerprint` is that of `weights`."""

    policy: PolicyRef
    weights: Weights
    lora: LoraSpec | None
    fingerprint: str


class Published:
    """The versions that every healthy engine has.

    `lock` is held while versions come or go and while an engine becomes healthy, so that the two never disagree.
    """

    def __init__(self, drained: Callable[[Version], None]) -> None:
        self.lock = asyncio.Lock()
        self._drained = drained
        self._versions: dict[str, Version] = {}
        self._users: dict[str, int] = {}
        self._retired: set[str] = set()

    def versions(self) -> dict[str, Version]:
        """All that engines must have, retired ones with unfinished requests included."""
        return dict(self._versions)

    def served(self) -> dict[str, str]:
        """Fingerprints of what new requests may ask for."""
        return {key: v.fingerprint for key, v in self._versions.items() if key not in self._retired}

    def known(self, policy: PolicyRef, fingerprint: str) -> bool:
        """Whether exactly this is served already. Raises RequestRefused for other weights under the same version."""
        version = self._versions.get(str(policy))
        if version is None:
            return False
        if version.fingerprint == fingerprint and str(policy) not in self._retired:
            return True
        raise RequestRefused(f"{policy} was published before with other weights.", "Publish under a new version.")

    def add(self, version: Version) -> None:
        self._versions[str(version.policy)] = version

    def enter(self, policy: PolicyRef) -> None:
        """A request of `policy` begins; `leave` ends it. Raises RequestRefused for a version that is not served."""
        key = str(policy)
        if key in self._retired or (key not in self._versions and policy.version != 0):
            raise RequestRefused(
                f"{policy} is not served; served are {sorted(self.served())} and every unpublished policy at "
                "version 0.",
                "Publish this version before sampling from it.",
            )
        self._users[key] = self._users.get(key, 0) + 1

    def leave(self, policy: PolicyRef) -> None:
        key = str(policy)
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
            if key in self._retired:
                self._drained(self._versions[key])

    def retire(self, policy: PolicyRef) -> Version | None:
        """Refuse new requests. The version, when nobody uses it; None when it will be `drained` later.

        Raises RequestRefused for a version that is not served.
        """
        key = str(policy)
        if key not in self._versions or key in self._retired:
            raise RequestRefused(f"{policy} is not served, so it cannot be retired.", "Retire what was published.")
        self._retired.add(key)
        return None if key in self._users else self._versions[key]

    def forget(self, version: Version) -> None:
        key = str(version.policy)
        self._versions.pop(key, None)
        self._retired.discard(key)


def keep(weights: Weights) -> dict[str, npt.NDArray[Any]]:
    """Weights that stay as they are now: arrays that somebody may write to are copied."""
    return {name: array if _fixed(array) else np.array(array) for name, array in weights.items()}


def _fixed(array: Any) -> bool:
    """Nobody can write to it: read-only, as Ray hands arrays over, and so is what it is a view of."""
    while isinstance(array, np.ndarray):
        if array.flags.writeable:
            return False
        array = array.base
    return True


def differences(expected: Mapping[str, str], served: Mapping[str, str]) -> list[str]:
    """What an engine does not serve as it should, in words."""
    wrong = []
    for key, fingerprint in sorted(expected.items()):
        if key not in served:
            wrong.append(f"{key} is missing")
        elif served[key] != fingerprint:
            wrong.append(f"{key} has the fingerprint {served[key]} instead of {fingerprint}")
    return wrong
