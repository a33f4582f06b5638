"""Starting a run from the policies of another run or an export (`--init`): each takes the weights of its roles."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from pathlib import Path

from cotune.adapters.bases import Moved
from cotune.adapters.export import TrainedPolicy
from cotune.adapters.fingerprint import differing_parts
from cotune.adapters.manifest import is_export, read_manifest
from cotune.errors import ConfigError
from cotune.records.policies import LoraSpec, Policies, PolicySpec
from cotune.storage.checkpoints import newest_checkpoint, read_policies
from cotune.storage.run_layout import BaseDigests, RunLayout, is_run, read_run
from cotune.trainer.evaluation.policies import open_evaluated_policies
from cotune.trainer.learner.protocol import Learner


def check_source(source: str) -> None:
    """Raise ConfigError unless `source` is a run with a checkpoint, an export, or empty."""
    if not source or is_export(Path(source)):
        return
    if not is_run(source) or newest_checkpoint(RunLayout(source).checkpoints) is None:
        raise ConfigError("init", source, "is neither a run with a checkpoint nor an export", "Train it first.")


def check_same_bases(source: str, policies: Policies, bases: BaseDigests) -> None:
    """Raise ConfigError if a policy of the run `source` was trained on another base model than this run has for the
    same roles. `bases` are the digests of this run's base models."""
    newest = None if is_export(Path(source)) else newest_checkpoint(RunLayout(source).checkpoints)
    if newest is None:
        return  # Exports are checked when they are opened.
    source_digests = read_run(source).held
    source_policy_of_role: dict[str, str] = {}
    for saved in read_policies(newest):
        source_policy_of_role |= dict.fromkeys(saved.roles, saved.name)
    for role, policy in policies.learning.items():
        source_policy = source_policy_of_role.get(role)
        if source_policy is None:
            continue  # The role starts untrained.
        changed = differing_parts(source_digests.of(source_policy), bases.of(policy))
        if changed:
            fault = f"was trained on another base model: the one of {source_policy} has another {', '.join(changed)}"
            raise ConfigError("init", source, fault)


async def warm_start(
    source: str, model: str, policies: Policies, learner: Learner, names: Collection[str] | None = None
) -> tuple[list[str], list[str]]:
    """Give the learner's policies (all, or the ones in `names`) the weights of `source`.

    Returns the policies that have taken weights, and notes for the user. Raises ConfigError if `source` has no policy
    for any of their roles, or a policy of another shape.
    """
    # 1. The trained policies of the source, by role.
    bases = _bases_of_export(source, model, policies) if is_export(Path(source)) else None
    source_policies = await asyncio.to_thread(open_evaluated_policies, source, bases)
    source_policy_of_role: dict[str, TrainedPolicy] = {}
    for source_policy in source_policies.policies:
        if source_policy.weights is not None:
            source_policy_of_role |= dict.fromkeys(source_policy.roles, source_policy)

    # 2. Give each policy of this run the weights of its roles.
    started: list[str] = []
    notes: list[str] = []
    for name, spec in policies.specs.items():
        if names is not None and name not in names:
            continue
        roles = policies.roles_of(name)
        if not spec.trained:
            unused = ", ".join(role for role in roles if role in source_policy_of_role)
            if unused:
                notes.append(f"not trained here: {unused}; the weights of {source} for it are not used")
            continue
        policy = _policy_for(spec, roles, source_policy_of_role, source)
        if policy is None:
            notes.append(f"{name} starts untrained: {source} has no policy of {', '.join(roles)}")
            continue
        assert policy.weights is not None
        await asyncio.to_thread(learner.adopt, name, policy.weights)
        started.append(name)
        notes.append(f"{name} starts from {policy.name}@{policy.version} of {source}")
    if not started and names is None:
        trained = ", ".join(sorted(source_policy_of_role)) or "none"
        raise ConfigError("init", source, f"has trained no role of this run; it has trained: {trained}")
    return started, notes


def _bases_of_export(source: str, model: str, policies: Policies) -> Moved:
    """Return the location of each base model of an export: the base model of this run for the same roles.

    `model` is the run's own base model. Raises ConfigError if one base model of the export corresponds to several of
    this run.
    """
    manifest = read_manifest(Path(source))
    exported_base_of_role: dict[str, str] = {}
    for entry in manifest.roles:
        exported = manifest.policy(entry.role)
        if exported.base:
            exported_base_of_role[entry.role] = exported.base.model
    location_of_base: dict[str, str] = {}
    for role, name in policies.learning.items():
        if role not in exported_base_of_role:
            continue
        exported_base = exported_base_of_role[role]
        base_here = policies.specs[name].model or model
        if location_of_base.setdefault(exported_base, base_here) != base_here:
            fault = f"has {exported_base} for roles that have several base models here, {role} among them"
            raise ConfigError("init", source, fault)
    return location_of_base


def _policy_for(
    spec: PolicySpec, roles: Collection[str], source_policy_of_role: Mapping[str, TrainedPolicy], source: str
) -> TrainedPolicy | None:
    """Return the policy of `source` that plays these roles; None if there is none. Raises ConfigError if there are
    several, or if it has another shape than `spec`."""
    candidates: dict[str, TrainedPolicy] = {}
    for role in roles:
        if role in source_policy_of_role:
            candidate = source_policy_of_role[role]
            candidates[candidate.name] = candidate
    if not candidates:
        return None
    if len(candidates) > 1:
        raise ConfigError(
            "init",
            source,
            f"has several policies ({', '.join(candidates)}) for {', '.join(roles)}, which share one here",
            "Use the same --policies in both runs.",
        )
    (policy,) = candidates.values()
    source_shape = (policy.kind, policy.lora)
    shape = (spec.kind, spec.lora if spec.kind == "lora" else None)
    if source_shape != shape:
        raise ConfigError(
            "init",
            source,
            f"has {policy.name} in another shape ({_describe_shape(*source_shape)}) than {spec.name} has here "
            f"({_describe_shape(*shape)})",
            "Use the same --policies and [lora] in both runs.",
        )
    return policy


def _describe_shape(kind: str, lora: LoraSpec | None) -> str:
    """The kind of a policy and the shape of its adapter, for an error."""
    if lora is None:
        return kind
    return f"{kind}, rank {lora.rank}, alpha {lora.alpha:g}, on {', '.join(lora.targets)}"
