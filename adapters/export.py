"""Writes exports: trained policies as folders that PEFT, transformers and vLLM load, or as GGUF files for llama.cpp and
Ollama, with a roles.json.

The first half writes; the second half, from `TrainedPolicy` on, reads the policies of a run.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import msgspec

from cotune.adapters.bases import Moved, present_paths
from cotune.adapters.card import CURVE, Background, read_background, write_card
from cotune.adapters.fingerprint import BaseFingerprint, base_fingerprint, checkpoint_fault, differing_parts, hashes_of
from cotune.adapters.manifest import (
    FORMAT,
    MANIFEST,
    Base,
    ExportedPolicy,
    ExportedRole,
    Manifest,
    is_export,
    serve_commands,
    write_manifest,
)
from cotune.adapters.versions import VERSIONS, finish_replacement, numbered, replace_export
from cotune.errors import AdapterError, ConfigError, CotuneError, RunError
from cotune.file_names import readable_file_name
from cotune.integrations.models.folder.folder import (
    count_parameters,
    folder_sees_images,
    locate_model,
    write_adapter,
    write_merged,
    write_model,
)
from cotune.integrations.models.folder.to_gguf import Precision, check_gguf, write_gguf
from cotune.prompts.edits import AS_WRITTEN, Prompts
from cotune.prompts.file import NAME as PROMPTS
from cotune.prompts.file import write_prompts
from cotune.reading.words import stayed_reasons, stayed_text
from cotune.records.policies import TRAINED, UNTRAINED, LoraSpec, PolicyKind
from cotune.sampling.protocol import Weights, fingerprint
from cotune.storage.checkpoints import (
    SavedPolicy,
    checkpoint_name,
    newest_checkpoint,
    read_best,
    read_policies,
    step_folders,
    steps_of,
)
from cotune.storage.metrics_file import read_metrics
from cotune.storage.open_store import open_store
from cotune.storage.run_layout import RunDescription, RunLayout, read_run, read_run_json, relocated
from cotune.storage.whole_file import is_full, sync

log = logging.getLogger("cotune")


def export_run(
    run: str | Path,
    out: str | Path,
    *,
    step: int | Literal["best"] | None = None,
    merge: bool = False,
    gguf: Precision | None = None,
    evaluation: str | Path | None = None,
    model: Moved = None,
    prompts: Prompts | None = None,
) -> Manifest:
    """Export the newest checkpoint of a run, or another one.

    `step` chooses the checkpoint after that many steps. With "best", each policy is exported as it was at its best
    held-out evaluation, and policies without an evaluation as they are now.

    With `merge`, adapters are added to their base model, so that each policy is a whole model. With `gguf`, that model
    is one file for llama.cpp and Ollama with matrices in this precision. The model card has the figures of
    `evaluation`, a folder that `cotune eval --out` wrote; the default is the newest evaluation of these weights in the
    run. `model` is the present place of a moved base model; if the run has several, it maps the old places to the new
    ones. `prompts` are edited prompts to use with the policies.

    Raises RunError, ConfigError, AdapterError.
    """
    if step is None:
        policies = latest_policies(run, model)
    elif step == "best":
        policies = best_policies(run, model)
    else:
        policies = policies_at(run, step, model)
    steps = {policy.step for policy in policies if policy.weights is not None and policy.step is not None}
    return write_export(
        out,
        [replace(policy, stayed=_why_never_updated(Path(run), policy)) for policy in policies],
        origin=Origin(
            run=Path(run).resolve().name,
            trained_with=read_run(run).prompts or AS_WRITTEN,
            models=_models_asked(Path(run)),
            background=read_background(Path(run), Path(evaluation) if evaluation else None, steps=steps),
        ),
        others=untrained_policy(run, model),
        merge=merge,
        gguf=gguf,
        prompts=prompts,
    )


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The run that exported policies come from, for roles.json and the model card."""

    run: str | None = None
    trained_with: str = ""
    """Id of the edited prompts that the policies were trained with; empty if these are the exported ones."""
    models: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The model names that each recorded role asked for."""
    background: Background | None = None
    """The figures of the model card."""


def _models_asked(run: Path) -> dict[str, tuple[str, ...]]:
    """The model names that each role asked for in the records that a run learned from; empty if these are unreadable.

    A role that asked for no model by name has an empty tuple.
    """
    records = read_run(run).config.records
    if records.path:  # a run that learned from an application's records
        address: str | Path = records.path
        app = records.app
    else:
        address = run
        app = ""
    try:
        with open_store(address, read_only=True) as store:
            roles_and_models = store.figures().models_asked(app)
    except CotuneError as error:
        log.warning("The export has no model names of roles, as the records cannot be read: %s", error)
        return {}
    models_of_role: dict[str, tuple[str, ...]] = {}
    for role, model in roles_and_models:
        earlier_models = models_of_role.get(role, ())
        models_of_role[role] = (*earlier_models, model) if model else earlier_models
    return models_of_role


def write_export(
    out: str | Path,
    policies: Sequence[TrainedPolicy],
    *,
    origin: Origin | None = None,
    others: TrainedPolicy | None = None,
    merge: bool = False,
    gguf: Precision | None = None,
    prompts: Prompts | None = None,
) -> Manifest:
    """Write policies to a new folder, or in place of an earlier export, which is kept as a version (see `versions`).

    `others` is the untrained model that plays roles without a policy; None leaves them to the application's provider.
    With `merge` an adapter is added to its base model; with `gguf` the result is one GGUF file of this precision.
    `prompts` are written next to the policies. The folder appears complete or not at all. Raises ConfigError if `out`
    holds other files than an export, and for a model that cannot be written as GGUF.
    """
    origin = origin or Origin()
    target = Path(out).resolve()
    finish_replacement(target)
    can_be_replaced = target.is_dir() and (is_export(target) or not any(target.iterdir()))
    if target.exists() and not can_be_replaced:
        fault = "holds other files, which an export would replace"
        raise ConfigError("out", str(target), fault, "Name a new or empty folder.")
    if gguf is not None:
        _check_bases_for_gguf(policies)
    if not any(policy.roles for policy in policies):
        raise ConfigError("policies", None, "play no role", "Train a run first.")
    # The export is written next to the target and synced to disk, then renamed: a crash never leaves a partial one.
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        manifest = _write_policies(partial, policies, others, origin, merge, gguf, prompts)
        manifest = msgspec.structs.replace(numbered(manifest, target), models=dict(origin.models))
        write_manifest(partial, manifest)
        write_card(partial, manifest, origin.background)
        _sync(partial)
        replace_export(target, partial)
    except Exception as error:
        if not is_full(error):
            raise
        cause = f"The disk of {target} is full: nothing is exported."
        raise RunError(cause, "Free some space, or name another --out.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return manifest


def _check_bases_for_gguf(policies: Sequence[TrainedPolicy]) -> None:
    """Raise ConfigError for a trained policy whose base cannot be written as GGUF."""
    checked: set[str] = set()
    for policy in policies:
        if policy.kind not in TRAINED or not policy.model or policy.model in checked:
            continue
        checked.add(policy.model)
        try:
            check_gguf(locate_model(policy.model))
        except ConfigError as error:
            fault = f"(the base of policy {policy.name!r}) {error.fault}"
            raise ConfigError(error.field, error.value, fault, error.remedy) from None


def _write_policies(
    folder: Path,
    policies: Sequence[TrainedPolicy],
    untrained: TrainedPolicy | None,
    origin: Origin,
    merge: bool,
    gguf: Precision | None,
    prompts: Prompts | None,
) -> Manifest:
    """Write the weights of all policies, and the prompts, into `folder`. Returns the manifest of the export, which the
    caller writes after them.

    `untrained` is the model that plays the roles without a policy; None leaves them to the application's provider.
    """
    base_of = functools.partial(
        _base_of,
        fingerprint=functools.cache(base_fingerprint),  # several policies may have one base
        as_whole_model=merge or gguf is not None,
    )
    exported: list[ExportedPolicy] = []
    roles: list[ExportedRole] = []
    for policy in policies:
        folders_in_use = [entry.folder for entry in exported if entry.folder]
        exported.append(_write_policy(folder, policy, base_of(policy), folders_in_use, merge, gguf))
        for role in policy.roles:
            metrics = dict(policy.metrics.get(role, {}))
            roles.append(ExportedRole(role=role, policy=policy.name, metrics=metrics))
    # The prompts of the training are named only if the exported ones are others.
    trained_with = ""
    if prompts is not None and origin.trained_with != prompts.id:
        trained_with = origin.trained_with
    manifest = Manifest(
        format=FORMAT,
        cotune=version("cotune"),
        created=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        run=origin.run,
        policies=tuple(exported),
        roles=tuple(roles),
        other_roles="frozen" if untrained else "provider",
        other_base=base_of(untrained) if untrained else None,
        prompts=prompts.id if prompts is not None else "",
        trained_with=trained_with,
    )
    if prompts is not None:
        write_prompts(folder, prompts)
    return msgspec.structs.replace(manifest, serve=serve_commands(manifest))


def _base_of(
    policy: TrainedPolicy, *, fingerprint: Callable[[Path], BaseFingerprint], as_whole_model: bool
) -> Base | None:
    """The base model that a policy was trained on, for roles.json; None for a policy without a local model.

    With `as_whole_model`, the policy is exported as a whole model: the precision of its base then does not matter.
    Raises AdapterError if the base has changed since the training.
    """
    if policy.kind == "provider" or not policy.model:
        return None
    model = locate_model(policy.model)
    # Policies of several runs may have one base with different tool formats or precisions.
    base = Base(
        model=str(model) if Path(policy.model).expanduser().exists() else policy.model,
        sha256=fingerprint(model),
        sees_images=folder_sees_images(model),
        tool_format=policy.tool_format,
        dtype=None if as_whole_model else policy.dtype,
    )
    policy.check_trained_on(base.model, base.sha256)
    return base


def whole_models_size(run: str | Path, gguf: Precision | None, model: Moved = None) -> int:
    """About how many bytes the trained policies of a run take as merged models (float32), or as GGUF files.

    Raises RunError, AdapterError, ConfigError.
    """
    # Merged models are float32. A block of q8_0 has 32 values of a byte each, and a scale of two bytes.
    bytes_per_value = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32}[gguf or "f32"]
    described = read_run(run)
    policies = read_policies(_newest_checkpoint(run))
    bases = _paths_of_bases(Path(run), described, policies, model)
    values = 0
    for policy in policies:
        base = policy.model or described.model
        if policy.kind in TRAINED and base is not None:
            values += count_parameters(locate_model(bases[base]))
    return int(values * bytes_per_value)


def _write_policy(
    folder: Path,
    policy: TrainedPolicy,
    base: Base | None,
    folders_in_use: Sequence[str],
    merge: bool,
    gguf: Precision | None,
) -> ExportedPolicy:
    """Write one policy below the export folder, and describe it for roles.json. Its folder is named after the policy,
    but not like one of `folders_in_use`.
    """
    if policy.kind in ("frozen", "provider"):
        return ExportedPolicy(name=policy.name, kind=policy.kind, version=policy.version, base=base)
    if policy.weights is None or base is None:
        raise AdapterError(f"Policy {policy.name!r} has no weights or no base model.", "Export a trained checkpoint.")
    names_in_use = [*folders_in_use, "README.md", MANIFEST, PROMPTS, CURVE, VERSIONS]
    name = readable_file_name(policy.name, names_in_use, "policy")
    (folder / name).mkdir()
    weights = _write_weights(folder / name, policy, base, merge, gguf)
    becomes_whole_model = merge or gguf is not None
    return ExportedPolicy(
        name=policy.name,
        kind="full" if becomes_whole_model else policy.kind,
        version=policy.version,
        base=base,
        folder=name,
        files=hashes_of(folder / name),
        fingerprint=fingerprint(weights),
        lora=None if becomes_whole_model else policy.lora,
        gguf=gguf,
        stayed=policy.stayed,
        step=policy.step,
    )


def _write_weights(folder: Path, policy: TrainedPolicy, base: Base, merge: bool, gguf: Precision | None) -> Weights:
    """Write a policy into its folder: as an adapter, as a model if it has full weights or with `merge`, or as a GGUF
    file with the precision `gguf`. Returns the written weights in float32.
    """
    model = locate_model(base.model)
    weights = policy.weights
    assert weights is not None
    if gguf is not None:
        # The GGUF file is converted from a merged model.
        with tempfile.TemporaryDirectory(prefix=".merged-", dir=folder.parent) as merged:
            merged_weights = _write_weights(Path(merged), policy, base, merge=True, gguf=None)
            name = f"{policy.name} of {Path(base.model).name}"
            write_gguf(Path(merged), folder / f"{folder.name}.gguf", gguf, name=name, base=base.model)
        (folder / "Modelfile").write_text(f"FROM ./{folder.name}.gguf\n")
        return merged_weights
    if policy.kind == "full":
        write_model(model, weights, folder)
        return weights
    if policy.lora is None:
        raise AdapterError(f"Policy {policy.name!r} is a LoRA without its shape.", "Pass its LoraSpec as `lora`.")
    if merge:
        return write_merged(model, weights, policy.lora, folder)
    write_adapter(folder, weights, policy.lora, base.model)
    return weights


def _sync(folder: Path) -> None:
    """Sync an export to disk, after giving all its files the access rights of roles.json."""
    mode = (folder / MANIFEST).stat().st_mode
    for path in (*folder.rglob("*"), folder):
        if path.is_file():
            path.chmod(mode)  # safetensors makes files for their owner alone
        sync(path)


@dataclass(frozen=True, kw_only=True)
class TrainedPolicy:
    """One policy at one version, ready to be exported."""

    name: str
    kind: PolicyKind
    version: int
    roles: Sequence[str]
    model: str | None
    """Folder or Hugging Face id of its base; None for a provider policy."""
    weights: Weights | None = None
    """The arrays that `Learner.weights` returns; None for a policy that is not trained."""
    lora: LoraSpec | None = None
    metrics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Figures by role."""
    trained_on: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of its base by part, as far as the run recorded it."""
    tool_format: str = "auto"
    dtype: str | None = None
    """Precision of the base while adapters were trained on it; None if unknown."""
    stayed: str = ""
    """The reason why no step has updated a trained policy; empty if one has."""
    step: int | None = None
    """How many steps its run had made at its checkpoint; None for a policy without a run."""
    evaluation_sampling: Mapping[str, Any] = field(default_factory=dict)
    """The `top_p`, `top_k` and `min_p` of its roles in evaluations, as far as its run sets them."""

    def check_trained_on(self, model: str, present: BaseFingerprint) -> None:
        """Raise AdapterError if the policy was trained on another base than `model`, which has the fingerprint
        `present`.
        """
        if wrong := differing_parts(self.trained_on, msgspec.to_builtins(present)):
            cause = f"{model} is not the base model that the run was started with: its {', '.join(wrong)} differ."
            raise AdapterError(cause, "Put the old one back, or name its place with --model.")


def _why_never_updated(run: Path, policy: TrainedPolicy) -> str:
    """The reasons why no step had updated a trained policy at its checkpoint, with the number of steps; empty if one
    had, or if the policy is not trained.
    """
    was_updated = policy.version > 0
    is_trained = policy.weights is not None
    if was_updated or not is_trained:
        return ""
    newest = newest_checkpoint(RunLayout(run).checkpoints)
    if newest is not None:
        was_updated_later = any(saved.version for saved in read_policies(newest) if saved.name == policy.name)
        if was_updated_later:
            return "this checkpoint came before its first update"
    reasons = stayed_reasons(read_metrics(run)).get(policy.name)
    return stayed_text(reasons) if reasons else "no step has trained it"


def latest_policies(run: str | Path, model: Moved = None) -> list[TrainedPolicy]:
    """Policies of the newest checkpoint of a run, with their weights. `model` is the present place of moved bases.

    Raises RunError, AdapterError, ConfigError.
    """
    return _policies_of_checkpoint(read_run(run), _newest_checkpoint(run), model)


def policies_at(run: str | Path, step: int, model: Moved = None) -> list[TrainedPolicy]:
    """Policies of a run as they were after `step` steps; otherwise as `latest_policies`."""
    checkpoints = RunLayout(run).checkpoints
    if not (checkpoints / checkpoint_name(step)).is_dir():
        steps = [steps_of(path) for path in step_folders(checkpoints)]
        if not steps:
            raise RunError(f"{run} has no checkpoint yet.", "Let the run finish a step.")
        raise ConfigError("step", step, f"is no checkpoint of {run}", f"These are kept: {', '.join(map(str, steps))}.")
    return _policies_of_checkpoint(read_run(run), checkpoints / checkpoint_name(step), model)


def _newest_checkpoint(run: str | Path) -> Path:
    """The newest checkpoint of a run. Raises RunError if the run has none."""
    checkpoints = RunLayout(run).checkpoints
    checkpoint = newest_checkpoint(checkpoints)
    if checkpoint is None:
        if names := ", ".join(path.name for path in step_folders(checkpoints)):
            raise RunError(f"{run}/checkpoints/latest is missing.", f"Write the name of a checkpoint into it: {names}.")
        raise RunError(f"{run} has no checkpoint yet.", "Let the run finish a step.")
    return checkpoint


def best_policies(run: str | Path, model: Moved = None) -> list[TrainedPolicy]:
    """Each trained policy of a run as it was at its best held-out evaluation; otherwise as `latest_policies`.

    A policy that was never evaluated is taken from the newest checkpoint.
    """
    described = read_run(run)
    checkpoints = RunLayout(run).checkpoints
    best = read_best(checkpoints)
    if not best:
        remedy = "Train with evaluation.tasks and evaluation.keep_best, or leave --step out."
        raise RunError(f"{run} has kept no best checkpoint.", remedy)
    # Several policies may share a best checkpoint: each is read once.
    policies_of_checkpoint: dict[str, dict[str, TrainedPolicy]] = {}
    for name in {figure.checkpoint for figure in best.values()}:
        policies = _policies_of_checkpoint(described, checkpoints / name, model)
        policies_of_checkpoint[name] = {policy.name: policy for policy in policies}

    chosen = []
    for latest in latest_policies(run, model):
        if latest.name in best:
            checkpoint = best[latest.name].checkpoint
            chosen.append(policies_of_checkpoint[checkpoint][latest.name])
        else:
            chosen.append(latest)
    return chosen


def untrained_policy(run: str | Path, moved: Moved = None) -> TrainedPolicy | None:
    """The untrained model if it plays the roles without a policy; None if the application's provider does."""
    described = read_run(run)
    if described.config.other_roles != "frozen" or described.model is None:
        return None
    saved = read_policies(_newest_checkpoint(run))
    return TrainedPolicy(
        name=UNTRAINED.name,
        kind="frozen",
        version=0,
        roles=(),
        model=_paths_of_bases(Path(run), described, saved, moved)[described.model],
        trained_on=described.held.base,
        tool_format=described.config.tool_format,
        dtype=described.dtype_of({policy.kind for policy in saved}),
    )


def _paths_of_bases(
    run: Path, described: RunDescription, policies: Sequence[SavedPolicy], moved: Moved
) -> dict[str, str]:
    """The present path of each base model of the run in the folder `run`, by the name that run.json has for it.

    `moved` has the new paths of models that the user has moved.
    """
    names = [policy.model or described.model for policy in policies if policy.kind != "provider"]
    if described.config.other_roles == "frozen":
        names.append(described.model)
    # A model that lies next to the run folder may have been moved together with it.
    run_json = read_run_json(run)
    path_after_move_of_run = {name: relocated(name, run_json, run.absolute()) for name in names if name}
    # Any other moved model is in `moved`.
    present_path = present_paths(path_after_move_of_run.values(), moved)
    return {name: present_path[path] for name, path in path_after_move_of_run.items()}


def _policies_of_checkpoint(described: RunDescription, checkpoint: Path, moved: Moved) -> list[TrainedPolicy]:
    """The policies of a checkpoint with their weights. Raises RunError if its files do not match their hashes."""
    if fault := checkpoint_fault(checkpoint, described.id):
        remedy = "Name an older checkpoint in checkpoints/latest, or train again."
        raise RunError(f"The checkpoint {checkpoint} is broken: {fault}.", remedy)
    saved_policies = read_policies(checkpoint)
    run = checkpoint.parent.parent
    path_of_base = _paths_of_bases(run, described, saved_policies, moved)
    dtype = described.dtype_of({saved.kind for saved in saved_policies})
    policies = []
    for saved in saved_policies:
        base = saved.model or described.model  # of the policy itself, or of all policies of the run
        weights = None
        if saved.weights_file:
            weights = read_weights(checkpoint / saved.weights_file)
        policy = TrainedPolicy(
            name=saved.name,
            kind=saved.kind,
            version=saved.version,
            roles=saved.roles,
            model=path_of_base.get(base) if base else None,
            weights=weights,
            lora=saved.lora,
            metrics=saved.metrics,
            trained_on=described.held.of(saved.name),
            tool_format=described.config.tool_format_of(saved.name),
            dtype=dtype,
            step=steps_of(checkpoint),
            evaluation_sampling=described.config.evaluation_sampling(saved.name),
        )
        policies.append(policy)
    return policies


def read_weights(path: Path) -> Weights:
    """Arrays of a safetensors file. Raises AdapterError if it cannot be read."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{path} cannot be read: {error}.", "Export or train again.") from None
