"""The trained policies of a run or an export, and what answers calls by them in this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cotune.adapters.export import TrainedPolicy, latest_policies
from cotune.adapters.fingerprint import base_fingerprint
from cotune.adapters.load import load_export
from cotune.adapters.manifest import is_export, read_manifest
from cotune.errors import AdapterError
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.integrations.models.engines import EngineConfig, open_sampler
from cotune.integrations.models.folder.folder import locate_base
from cotune.records.policies import OtherRoles, stand_in
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import fingerprint, publish_verified
from cotune.sampling.responder import PolicyResponder
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

    @contextlib.asynccontextmanager
    async def responder(
        self, *, threads: int | None = None, say: Callable[[str], None] = lambda text: None, **options: Any
    ) -> AsyncIterator[PolicyResponder]:
        """These policies in a sampler of this process, answering calls; `options` are further fields of the responder.

        `say` is told what takes time. Raises SyncError when a policy arrives altered.
        """
        say(f"loading the model {self.model} ...")
        chat = await asyncio.to_thread(ChatTemplate.load, self.model, self.tool_format)
        sampler = await open_sampler(EngineConfig(model=self.model, threads=threads))
        try:
            say("publishing the policies ...")
            for policy in self.policies:
                if policy.weights is not None:
                    lora = policy.lora if policy.kind == "lora" else None
                    ref = PolicyRef(policy.name, policy.version)
                    await publish_verified(sampler, ref, policy.weights, lora, fingerprint(policy.weights))
            yield PolicyResponder(
                sampler,
                chat,
                self.roles,
                provider_roles=self.provider_roles,
                others=stand_in(self.other_roles),
                **options,
            )
        finally:
            await sampler.aclose()


def open_evaluated_policies(source: str | Path, model: str | None = None) -> EvaluatedPolicies:
    """Read the newest checkpoint of a run, or an export (hashes checked).

    `model` replaces the recorded path of the base model. Raises RunError, AdapterError.
    """
    folder, base = Path(source), model
    if is_export(folder):
        manifest = read_manifest(folder)
        export = load_export(folder, model, untrained=True)
        base = str(export.engines[0].folder) if export.engines else None
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
        other_roles, tool_format = manifest.other_roles, next((base.tool_format for base in manifest.bases), "auto")
    else:
        policies = latest_policies(folder)
        base = base or next((policy.model for policy in policies if policy.model), None)
        config = read_run(folder).config
        other_roles, tool_format = config.other_roles, config.tool_format
    if base is None:
        raise AdapterError(f"{folder} leaves every role to a provider.", "There is nothing to evaluate against it.")
    return EvaluatedPolicies(base, policies, other_roles, tool_format)
