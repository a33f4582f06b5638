"""Earlier versions that play against the present ones: their weights in the run folder, for a resumed run too."""

from __future__ import annotations

import asyncio
from pathlib import Path

from safetensors.numpy import load_file, save_file

from cotune.records.policies import LoraSpec
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import Sampler, Weights, fingerprint, publish_verified
from cotune.trainer.config.routing import RoutingConfig
from cotune.trainer.publish import Proof, norm
from cotune.trainer.schedules.routing import pool


def keep_opponent(folder: Path, routing: RoutingConfig, policy: PolicyRef, weights: Weights) -> None:
    """Write a version's weights where a later step may play against it, and remove those that have left the pool."""
    if routing.past and policy.version % routing.pool_every == 0:
        folder.mkdir(exist_ok=True)
        partial = folder / f".{policy}.partial"
        save_file({name: array.copy() for name, array in weights.items()}, partial)
        partial.rename(_file(folder, policy))
    stays = {_file(folder, PolicyRef(policy.name, v)) for v in (policy.version, *pool(routing, policy.version))}
    for old in set(folder.glob(f"{policy.name}@*.safetensors")) - stays:
        old.unlink()


def drop_opponents(folder: Path, present: PolicyRef) -> None:
    """Remove the kept versions of a policy after `present`, which a rollback has abandoned."""
    for file in folder.glob(f"{present.name}@*.safetensors"):
        if int(file.stem.rpartition("@")[2]) > present.version:
            file.unlink()


async def publish_opponents(
    sampler: Sampler, folder: Path, routing: RoutingConfig, present: PolicyRef, lora: LoraSpec | None
) -> list[Proof]:
    """Publish the kept versions before `present`, as far as their weights are there; they are older than what a
    checkpoint holds. Returns their proofs, oldest first."""
    proofs = []
    for version in pool(routing, present.version):
        old = PolicyRef(present.name, version)
        if _file(folder, old).exists():
            weights = await asyncio.to_thread(load_file, _file(folder, old))
            proof = Proof(policy=old, fingerprint=fingerprint(weights), norm=norm(weights))
            await publish_verified(sampler, old, weights, lora, proof.fingerprint)
            proofs.append(proof)
    return proofs


def _file(folder: Path, policy: PolicyRef) -> Path:
    return folder / f"{policy}.safetensors"
