"""Starting a run from the policies of another one (`--init`): each takes the weights that its roles have there."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from cotune.adapters.bases import Moved
from cotune.adapters.export import TrainedPolicy
from cotune.adapters.fingerprint import other_parts
from cotune.adapters.manifest import is_export, read_manifest
from cotune.errors import ConfigError
from cotune.records.policies import Policies, PolicySpec
from cotune.storage.checkpoints import newest_checkpoint, read_policies
from cotune.storage.run_layout import Held, RunLayout, is_run, read_run
from cotune.trainer.evaluation.policies import open_evaluated_policies
from cotune.trainer.learner.protocol import Learner


def check_source(source: str) -> None:
    """Raises ConfigError unless `source` is a run with a checkpoint or an export; "" passes."""
    if not source or is_export(Path(source)):
        return
    if not is_run(source) or newest_checkpoint(RunLayout(source).checkpoints) is None:
        raise ConfigError("init", source, "is neither a run with a checkpoint nor an export", "Train it first.")


def check_same_bases(source: str, policies: Policies, bases: Held) -> None:
    """Raises ConfigError where a policy of the run `source` was trained on another base than the policy of its roles
    here has, by its digests."""
    newest = None if is_export(Path(source)) else newest_checkpoint(RunLayout(source).checkpoints)
    if newest is None:
        return  # an export has been checked when it was opened
    held, there = read_run(source).held, {role: one.name for one in read_policies(newest) for role in one.roles}
    for role, name in policies.learning.items():
        if role in there and (other := other_parts(held.of(there[role]), bases.of(name))):
            fault = f"was trained on another base model: that of {there[role]} has another {', '.join(other)}"
            raise ConfigError("init", source, fault)


async def warm_start(
    source: str, model: str, policies: Policies, learner: Learner, names: Collection[str] | None = None
) -> tuple[list[str], list[str]]:
    """Give the learner's policies, or those of them in `names`, the weights of `source`.

    Returns the policies that took some, and what the user should know. Raises ConfigError where `source` has no policy
    for any of their roles, or one of another shape.
    """
    bases = _bases_of(source, model, policies) if is_export(Path(source)) else None
    found = await asyncio.to_thread(open_evaluated_policies, source, bases)
    there = {role: policy for policy in found.policies if policy.weights is not None for role in policy.roles}
    begun: list[str] = []
    notes: list[str] = []
    for name, spec in policies.specs.items():
        roles = policies.roles_of(name)
        if names is not None and name not in names:
            continue
        if not spec.trained:
            lost = ", ".join(role for role in roles if role in there)
            notes += [f"not trained here: {lost}; what {source} has learned for it is not used"] if lost else []
            continue
        policy = _source_of(spec, roles, there, source)
        if policy is None:
            notes.append(f"{name} starts untrained: {source} has no policy of {', '.join(roles)}")
            continue
        assert policy.weights is not None
        await asyncio.to_thread(learner.adopt, name, policy.weights)
        begun.append(name)
        notes.append(f"{name} starts from {policy.name}@{policy.version} of {source}")
    if not begun and names is None:
        known = ", ".join(sorted(there)) or "none"
        raise ConfigError("init", source, f"has trained no role of this run; it has trained: {known}")
    return begun, notes


def _bases_of(source: str, model: str, policies: Policies) -> Moved:
    """The base models of an export as they are here, by the roles that have them; `model` is the run's own. Raises
    ConfigError where one is of roles that have several here."""
    manifest = read_manifest(Path(source))
    recorded = {
        entry.role: policy.base.model for entry in manifest.roles if (policy := manifest.policy(entry.role)).base
    }
    here: dict[str, str] = {}
    for role, name in policies.learning.items():
        base = policies.specs[name].model or model
        if role in recorded and here.setdefault(recorded[role], base) != base:
            fault = f"has {recorded[role]} for roles that have several base models here, {role} among them"
            raise ConfigError("init", source, fault)
    return here


def _source_of(
    spec: PolicySpec, roles: Collection[str], there: Mapping[str, TrainedPolicy], source: str
) -> TrainedPolicy | None:
    """The one policy of `source` that plays these roles; None where it has none. Raises ConfigError."""
    playing = {there[role].name: there[role] for role in roles if role in there}
    if not playing:
        return None
    if len(playing) > 1:
        raise ConfigError(
            "init",
            source,
            f"has several policies ({', '.join(playing)}) for {', '.join(roles)}, which share one here",
            "Use the same --policies in both runs.",
        )
    (policy,) = playing.values()
    shape, own = (policy.kind, policy.lora), (spec.kind, spec.lora if spec.kind == "lora" else None)
    if shape != own:
        raise ConfigError(
            "init",
            source,
            f"has {policy.name} in another shape ({_shape(*shape)}) than {spec.name} has here ({_shape(*own)})",
            "Use the same --policies and [lora] in both runs.",
        )
    return policy


def _shape(kind: str, lora: Any) -> str:
    return kind if lora is None else f"{kind}, rank {lora.rank}, alpha {lora.alpha:g}, on {', '.join(lora.targets)}"
