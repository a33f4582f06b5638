"""Publishing a version of a policy to a sampler, and making sure that it arrived."""

from __future__ import annotations

from cotune.errors import SyncError
from cotune.policies import LoraSpec
from cotune.recording.records import PolicyRef
from cotune.sampling.protocol import Sampler, Weights


async def publish_verified(
    sampler: Sampler, policy: PolicyRef, weights: Weights, lora: LoraSpec | None, sent: str
) -> None:
    """Publish weights whose fingerprint is `sent`. Raises SyncError when they arrive altered."""
    arrived = await sampler.publish(policy, weights, lora)
    if arrived != sent:
        raise SyncError(
            f"Policy {policy} arrived with fingerprint {arrived}; {sent} was sent.",
            "Check the sampler's log: weights were lost or altered on the way.",
        )
