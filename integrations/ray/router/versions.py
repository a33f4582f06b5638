"""What a router has published: the weights that a restarted engine must be given again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cotune.integrations.samplers.versions import Versions
from cotune.policies import LoraSpec
from cotune.sampling.protocol import Weights


@dataclass(frozen=True)
class Artifact:
    """What a version is made of."""

    weights: Weights
    lora: LoraSpec | None


def expected(versions: Versions) -> dict[str, str]:
    """Fingerprints of what every healthy engine serves at this moment; nothing while versions come or go.

    An engine may hold the full weights of one version only: of those the last one counts.
    """
    if versions.lock.locked():
        return {}
    last = {version.policy.name: version for version in versions.all() if version.target.lora is None}
    kept = [v for v in versions.all() if not v.retired and (v.target.lora is not None or v in last.values())]
    return {str(version.policy): version.fingerprint for version in kept}


def keep(weights: Weights) -> dict[str, npt.NDArray[Any]]:
    """Weights that stay as they are now: arrays are copied, unless they are read-only, as Ray hands them over."""
    return {name: np.array(array) if array.flags.writeable else array for name, array in weights.items()}


def differences(wanted: Mapping[str, str], served: Mapping[str, str]) -> list[str]:
    """What an engine does not serve as it should, in words."""
    wrong = []
    for key, fingerprint in sorted(wanted.items()):
        if key not in served:
            wrong.append(f"{key} is missing")
        elif served[key] != fingerprint:
            wrong.append(f"{key} has the fingerprint {served[key]} instead of {fingerprint}")
    return wrong
