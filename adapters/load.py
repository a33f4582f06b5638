"""Opens an export after checking it, and publishes what it holds to a sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cotune.adapters.export import read_weights
from cotune.adapters.fingerprint import base_fingerprint, changed
from cotune.adapters.manifest import MANIFEST, Base, ExportedPolicy, Manifest, read_manifest
from cotune.errors import AdapterError, ConfigError
from cotune.integrations.models.folder import ADAPTER_FILE, locate_model, read_parameters
from cotune.recording.records import PolicyRef
from cotune.sampling.protocol import Sampler, Weights, fingerprint, publish_verified

_UNREAD = (".md", ".gitattributes", ".gitignore", ".DS_Store")
"""Ends of names of files that no loader reads: they may be added to an export."""


@dataclass(frozen=True)
class Export:
    """A checked export. `model` is the folder that a sampler is built from; None where all is left to a provider."""

    folder: Path
    manifest: Manifest
    model: Path | None

    @property
    def roles(self) -> dict[str, PolicyRef]:
        """Role -> policy version, for the roles that this export answers (not those left to a provider)."""
        played = {entry.role: self.manifest.policy(entry.role) for entry in self.manifest.roles}
        return {role: policy.ref for role, policy in played.items() if policy.kind != "provider"}

    def weights(self, policy: ExportedPolicy) -> Weights | None:
        """Trained weights of a policy, checked against their fingerprint; None where there are none."""
        if policy.folder is None:
            return None
        folder = self.folder / policy.folder
        weights = read_weights(folder / ADAPTER_FILE) if policy.kind == "lora" else read_parameters(folder)
        found = fingerprint(weights)
        if found != policy.fingerprint:
            raise AdapterError(
                f"{folder}: the weights have fingerprint {found}, roles.json says {policy.fingerprint}.",
                "Export the run again.",
            )
        return weights

    async def publish(self, sampler: Sampler) -> None:
        """Publish every trained policy. Raises SyncError when one arrives altered."""
        for policy in self.manifest.policies:
            weights = self.weights(policy)
            if weights is not None and policy.fingerprint is not None:
                await publish_verified(sampler, policy.ref, weights, policy.lora, policy.fingerprint)


def load_export(folder: str | Path, base: str | Path | None = None, *, roles: Sequence[str] = ()) -> Export:
    """Open an export and check it: manifest, hash of every file, base model, and that it has `roles`.

    `base` replaces the recorded path of the base model; its content must be the same. Raises AdapterError.
    """
    path = Path(folder)
    if not path.is_dir():
        raise AdapterError(f"There is no folder {path}.", "Name a folder that cotune export wrote.")
    manifest = read_manifest(path)
    for role in roles:
        manifest.policy(role)
    for policy in manifest.policies:
        _check_files(path, policy)
    return Export(path, manifest, _model_folder(path, manifest, base))


def _check_files(export: Path, policy: ExportedPolicy) -> None:
    """What the manifest lists is there, as it was written, inside the export; and nothing else that a loader reads."""
    if policy.folder is None:
        return
    folder, where = export / policy.folder, f"Policy {policy.name!r}"
    outside = next((path for path in (folder, *folder.rglob("*")) if not _is_inside(path, export)), None)
    if outside is not None:
        raise AdapterError(f"{where}: {outside} leads outside the export.", "Replace the link by what it leads to.")
    if wrong := changed(folder, policy.files, MANIFEST):
        raise AdapterError(f"{where}: {folder}: {wrong}.", "The file was changed or damaged: export the run again.")
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    added = sorted(name for name in names if name not in policy.files and not name.endswith(_UNREAD))
    if added:
        raise AdapterError(
            f"{where}: {folder / added[0]} is not in roles.json, and what loads the folder may read it.",
            "Remove it, or export the run again.",
        )


def _is_inside(path: Path, export: Path) -> bool:
    return path.resolve().is_relative_to(export.resolve())


def _model_folder(export: Path, manifest: Manifest, given: str | Path | None) -> Path | None:
    """The folder that a sampler is built from: the checked base, or a full model where nothing needs a base."""
    kinds = {policy.kind for policy in manifest.policies}
    full = next((policy for policy in manifest.policies if policy.kind == "full"), None)
    if given is None and full is not None and not kinds & {"lora", "frozen"} and manifest.other_roles != "frozen":
        return export / str(full.folder)
    bases = {policy.base.model: policy.base for policy in manifest.policies if policy.base}
    if len(bases) > 1:
        raise AdapterError(
            f"The export stands on several base models: {', '.join(bases)}.", "Serve each with a server of its own."
        )
    return next((_checked_base(base, given or base.model) for base in bases.values()), None)


def _checked_base(recorded: Base, model: str | Path) -> Path:
    try:
        folder = locate_model(model)
    except ConfigError as error:
        raise AdapterError(f"The base model cannot be loaded: {error.cause}", "Name its folder by --model.") from None
    found = base_fingerprint(folder)
    if wrong := recorded.sha256.differences(found):
        part = wrong[0]
        raise AdapterError(
            f"The export was trained on another base: {', '.join(wrong)} of {folder} differ ({part} has SHA-256 "
            f"{getattr(found, part)}, roles.json says {getattr(recorded.sha256, part)}).",
            f"Name by --model the copy of {recorded.model} that it was trained on.",
        )
    return folder
