"""What a router has published: the weights that a restarted engine must be given again, and who still uses them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
        self._users: Counter[str] = Counter()
        self._retired: set[str] = set()

    def versions(self) -> list[Version]:
        """All that engines must have, in the order of publishing, retired ones with unfinished requests included."""
        return list(self._versions.values())

    def served(self) -> dict[str, str]:
        """Fingerprints of what new requests may ask for."""
        return {key: v.fingerprint for key, v in self._versions.items() if key not in self._retired}

    def expected(self) -> dict[str, str]:
        """Fingerprints of what every healthy engine serves at this moment; nothing while versions come or go.

        An engine may hold the full weights of one version only: of those the last one counts.
        """
        if self.lock.locked():
            return {}
        last = {v.policy.name: key for key, v in self._versions.items() if v.lora is None}
        adapters = {key for key, v in self._versions.items() if v.lora is not None}
        return {key: value for key, value in self.served().items() if key in adapters or key in last.values()}

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

    @contextmanager
    def used(self, policy: PolicyRef) -> Iterator[None]:
        """While a request of `policy` runs. Raises RequestRefused for a version that is not served."""
        key = str(policy)
        if key in self._retired or (key not in self._versions and policy.version != 0):
            raise RequestRefused(
                f"{policy} is not served; served are {sorted(self.served())} and every unpublished policy at "
                "version 0.",
                "Publish this version before sampling from it.",
            )
        self._users[key] += 1
        try:
            yield
        finally:
            self._users[key] -= 1
            if not self._users[key] and key in self._retired:
                self._drained(self._versions[key])

    def retire(self, policy: PolicyRef) -> Version | None:
        """Refuse new requests. The version, when nobody uses it; None when it will be `drained` later.

        Raises RequestRefused for a version that is not served.
        """
        key = str(policy)
        if key not in self._versions or key in self._retired:
            raise RequestRefused(f"{policy} is not served, so it cannot be retired.", "Retire what was published.")
        self._retired.add(key)
        return None if self._users[key] else self._versions[key]

    def forget(self, version: Version) -> None:
        key = str(version.policy)
        self._versions.pop(key, None)
        self._users.pop(key, None)
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
