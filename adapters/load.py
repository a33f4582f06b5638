"""Opens an export and checks it: its manifest, the hash of every file, and the base model of each engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cotune.adapters.bases import Moved, present_paths
from cotune.adapters.export import read_weights
from cotune.adapters.fingerprint import base_fingerprint
from cotune.adapters.manifest import Base, ExportedPolicy, Manifest, check_files, read_manifest
from cotune.adapters.versions import earlier_versions, interrupted_replacement
from cotune.errors import AdapterError, ConfigError
from cotune.integrations.models.folder.folder import ADAPTER_FILE, locate_model, read_parameters
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import Sampler, Weights, fingerprint, publish_verified


@dataclass(frozen=True)
class EngineModel:
    """A base model of an export: the folder that its engine is opened from, and the policies that it serves."""

    base: Base
    folder: Path
    policies: tuple[ExportedPolicy, ...]


@dataclass(frozen=True)
class Export:
    """A checked export."""

    folder: Path
    manifest: Manifest
    engines: tuple[EngineModel, ...]
    """One for each base model; the base of `other_roles` is first. Empty if a provider answers every role."""

    @property
    def roles(self) -> dict[str, PolicyRef]:
        """Role -> policy version, for the roles that this export answers (not those left to a provider)."""
        policy_of_role = {entry.role: self.manifest.policy(entry.role) for entry in self.manifest.roles}
        return {role: policy.ref for role, policy in policy_of_role.items() if policy.kind != "provider"}

    def folder_now(self) -> Path:
        """The present folder of this version. A later export to its folder moves it to .versions, or removes it.

        An engine that ends is opened again from here, so a server keeps its version. Raises AdapterError if it was
        removed.
        """
        for folder in (self.folder, *earlier_versions(self.folder).values()):
            try:
                manifest = read_manifest(folder)
            except AdapterError:
                continue  # a damaged version, which may not be this one
            if manifest.export_version == self.manifest.export_version and manifest.created == self.manifest.created:
                return folder
        cause = f"{self.folder} no longer has {self.manifest.title}: later exports replaced it."
        raise AdapterError(cause, "Start again with the present version.")

    def model_folder(self, engine: EngineModel) -> Path:
        """The folder that an engine is opened from now: the base model, or a full model of this export."""
        for policy in engine.policies:
            if policy.folder is not None and engine.folder == self.folder / policy.folder:
                return self.folder_now() / policy.folder
        return engine.folder

    def weights(self, policy: ExportedPolicy) -> Weights | None:
        """Trained weights of a policy, checked against their fingerprint; None for a policy that is not trained."""
        if policy.folder is None:
            return None
        folder = self.folder_now() / policy.folder
        weights = read_weights(folder / ADAPTER_FILE) if policy.kind == "lora" else read_parameters(folder)
        present = fingerprint(weights)
        if present != policy.fingerprint:
            raise AdapterError(
                f"{folder}: the weights have fingerprint {present}, roles.json says {policy.fingerprint}.",
                "Export the run again.",
            )
        if policy.lora is not None:
            # An engine scales the adapter by alpha / rank: a wrong rank would change the answers without an error.
            ranks = {tensor.shape[0] for name, tensor in weights.items() if ".lora_A." in name}
            if ranks - {policy.lora.rank}:
                raise AdapterError(
                    f"{folder}: the adapter has rank {max(ranks)}, roles.json says {policy.lora.rank}.",
                    "Correct roles.json and adapter_config.json, or export the run again.",
                )
        return weights

    async def publish(self, engine: EngineModel, sampler: Sampler) -> None:
        """Publish the trained policies of one base model. Raises SyncError if one arrives altered."""
        for policy in engine.policies:
            weights = self.weights(policy)
            if weights is not None and policy.fingerprint is not None:
                await publish_verified(sampler, policy.ref, weights, policy.lora, policy.fingerprint)


def load_export(folder: str | Path, base: Moved = None, *, untrained: bool = False) -> Export:
    """Open an export and check it: manifest, hash of every file, base models.

    `base` is the present place of moved base models; their content must be the same. With `untrained`, every engine is
    opened from its base model, so that the untrained model can answer too. Raises AdapterError, ConfigError.
    """
    path = Path(folder)
    if not path.is_dir():
        if replaced := interrupted_replacement(path.absolute()):
            cause = f"Folder {path} is missing, because an export to it was interrupted."
            raise AdapterError(cause, f"Export again, or restore the earlier version: mv {replaced} {path}")
        raise AdapterError(f"There is no folder {path}.", "Name a folder that cotune export wrote.")
    manifest = read_manifest(path)
    for policy in manifest.policies:
        check_files(path, policy)
        if policy.gguf is not None:
            raise AdapterError(
                f"{path} holds GGUF files, which llama.cpp, Ollama and LM Studio read.",
                "Export without --gguf for cotune.",
            )
    return Export(path, manifest, _engines(path, manifest, base, untrained))


def _engines(export: Path, manifest: Manifest, moved: Moved, untrained: bool) -> tuple[EngineModel, ...]:
    """The engine of each base model of an export, with the folder to open it from and the policies that it serves.

    An engine is opened from the base model, after a check that this is the one the policies were trained on. If no
    policy needs the base model itself, it is opened from a fully trained model of the export. `moved` has the present
    paths of moved base models. With `untrained`, every base model is needed, because it answers requests too.
    """
    # The base model of roles without a policy comes first: its chat format is the default.
    bases = sorted(manifest.bases, key=lambda base: base != manifest.other_base)
    path_of_model = present_paths([base.model for base in bases], moved)
    engines = []
    for base in bases:
        path = path_of_model[base.model]
        policies = tuple(policy for policy in manifest.policies if policy.base == base)
        full_policy = next((policy for policy in policies if policy.kind == "full"), None)
        has_other_policies = any(policy.kind in ("lora", "frozen") for policy in policies)
        needs_base = untrained or base == manifest.other_base or has_other_policies
        # A base that the user has moved is loaded, and so checked, even if a full model would do.
        if full_policy is None or needs_base or path != base.model:
            folder = _checked_base(base, path)
        else:
            folder = export / str(full_policy.folder)
        engines.append(EngineModel(base, folder, policies))
    return tuple(engines)


def _checked_base(recorded: Base, path: str) -> Path:
    """The folder of the base model at `path`. Raises AdapterError if it is missing or differs from the recorded one."""
    name = Path(recorded.model).name
    try:
        folder = locate_model(path)
    except ConfigError as error:
        remedy = f"Name its folder: --model {name}=FOLDER"
        raise AdapterError(f"The base model {recorded.model} cannot be loaded: {error.cause}", remedy) from None
    present = base_fingerprint(folder)
    if differing := recorded.sha256.differences(present):
        part = differing[0]
        raise AdapterError(
            f"The export was trained on another base: {', '.join(differing)} of {folder} differ ({part} has SHA-256 "
            f"{getattr(present, part)}, roles.json says {getattr(recorded.sha256, part)}).",
            f"Name the copy of {recorded.model} that it was trained on: --model {name}=FOLDER",
        )
    return folder
