"""The policies that an evaluation compares, from a run or an export, and how they get into a sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cotune.adapters.export import TrainedPolicy, latest_policies
from cotune.adapters.fingerprint import base_fingerprint
from cotune.adapters.manifest import is_export, read_manifest
from cotune.adapters.open_policies import load_export
from cotune.errors import AdapterError
from cotune.integrations.models.folder.folder import locate_base
from cotune.records.policies import OtherRoles
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import Sampler, fingerprint, publish_verified
from cotune.storage.run_layout import read_run


@dataclass(frozen=True)
class EvaluatedPolicies:
    """Policies with their weights, and the folder or Hugging Face id of the base `model`, which is their version 0.

    `other_roles` says what plays a role without a policy.
    """

    model: str
    policies: Sequence[TrainedPolicy]
    other_roles: OtherRoles = "frozen"
    tool_format: str = "auto"

    @property
    def roles(self) -> dict[str, PolicyRef]:
        """The trained version of each role that is not left to a provider."""
        return {
            role: PolicyRef(policy.name, policy.version)
            for policy in self.policies
            if policy.kind != "provider"
            for role in policy.roles
        }

    @property
    def trained(self) -> list[str]:
        """Names of the policies that have weights of their own."""
        return [policy.name for policy in self.policies if policy.weights is not None]

    @property
    def provider_roles(self) -> list[str]:
        return [role for policy in self.policies if policy.kind == "provider" for role in policy.roles]

    def check_base(self) -> None:
        """Raises ConfigError where the base model is not there, AdapterError where it is not that of the run."""
        folder = locate_base(self.model)
        if known := [policy for policy in self.policies if policy.trained_on]:
            found = base_fingerprint(folder)
            for policy in known:
                policy.check_trained_on(self.model, found)

    async def publish(self, sampler: Sampler) -> None:
        """Publish every trained policy. Raises SyncError when one arrives altered."""
        for policy in self.policies:
            if policy.weights is None:
                continue
            ref, lora = PolicyRef(policy.name, policy.version), policy.lora if policy.kind == "lora" else None
            await publish_verified(sampler, ref, policy.weights, lora, fingerprint(policy.weights))


def open_evaluated_policies(source: str | Path, model: str | None = None) -> EvaluatedPolicies:
    """Read the newest checkpoint of a run, or an export (hashes checked).

    `model` replaces the recorded path of the base model. Raises RunError, AdapterError.
    """
    folder = Path(source)
    if is_export(folder):
        return _from_export(folder, model)
    policies = latest_policies(folder)
    base = model or next((policy.model for policy in policies if policy.model), None)
    config = read_run(folder).config
    return EvaluatedPolicies(_needed(base, folder), policies, config.other_roles, config.tool_format)


def _from_export(folder: Path, model: str | None) -> EvaluatedPolicies:
    manifest = read_manifest(folder)
    recorded = next((policy.base.model for policy in manifest.policies if policy.base), None)
    export = load_export(folder, model or recorded)
    policies = [
        TrainedPolicy(
            name=policy.name,
            kind=policy.kind,
            version=policy.version,
            roles=[entry.role for entry in manifest.roles if entry.policy == policy.name],
            model=policy.base.model if policy.base else None,
            weights=export.weights(policy),
            lora=policy.lora,
        )
        for policy in manifest.policies
    ]
    return EvaluatedPolicies(_needed(export.model, folder), policies, manifest.other_roles, manifest.tool_format)


def _needed(model: str | Path | None, folder: Path) -> str:
    if model is None:
        raise AdapterError(f"{folder} leaves every role to a provider.", "There is nothing to evaluate against it.")
    return str(model)
