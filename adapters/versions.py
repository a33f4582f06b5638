"""Versions of an export.

The newest version lies in the folder of the export, where servers, Modelfiles and applications name its files. Earlier
versions lie below it, each a whole export: EXPORT/.versions/1, EXPORT/.versions/2, and so on.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from cotune.adapters.manifest import Manifest, check_files, is_export, read_manifest
from cotune.errors import AdapterError, ConfigError
from cotune.storage.whole_file import sync

VERSIONS = ".versions"
"""Folder in an export that holds its earlier versions."""
EARLIER_ADAPTERS = 3
"""How many earlier versions an export of adapters keeps. They are small."""
EARLIER_MODELS = 1
"""How many earlier versions an export of whole models (full, merged or GGUF) keeps. Each is as large as its base."""


def earlier_versions(export: Path) -> dict[int, Path]:
    """The folders of the earlier versions of an export by number, in order. They may be damaged."""
    numbers = [int(path.name) for path in (export / VERSIONS).glob("*") if path.name.isdecimal()]
    return {number: export / VERSIONS / str(number) for number in sorted(numbers)}


def present_version(export: Path) -> int:
    """The number of the version in the folder of an export; 0 if there is none yet.

    If its roles.json is broken, it is the number after the earlier versions.
    """
    if not is_export(export):
        return 0
    try:
        return read_manifest(export).export_version
    except AdapterError:
        return max(earlier_versions(export), default=0) + 1


def numbered(manifest: Manifest, export: Path) -> Manifest:
    """The manifest as the next version of an export: its number is higher than the number of any version."""
    present = present_version(export)
    next_version = max([present, *earlier_versions(export)]) + 1
    return msgspec.structs.replace(manifest, export_version=next_version, replaced_version=present)


def replace_export(export: Path, incoming: Path) -> None:
    """Put the complete export `incoming` in place of the present version, which becomes an earlier one.

    `incoming` lies next to the export or in its .versions. A crash loses no version: `finish_replacement`, which runs
    before the next replacement, undoes or completes it.
    """
    replaced = _folder_being_replaced(export)
    number = present_version(export)  # read before the folder moves
    if is_export(export):
        export.rename(replaced)
        if incoming.is_relative_to(export):  # it has moved with its parent
            incoming = replaced / incoming.relative_to(export)
    try:
        incoming.rename(export)
    except BaseException:
        if replaced.exists():
            replaced.rename(export)
        raise
    sync(export.parent)
    if replaced.exists():
        _keep_as_earlier(export, replaced, number)


def finish_replacement(export: Path) -> None:
    """Complete a replacement that was interrupted.

    The replaced version becomes an earlier one, or is put back if no other version has taken its place.
    """
    replaced = _folder_being_replaced(export)
    if not replaced.exists():
        return
    if is_export(export):
        _keep_as_earlier(export, replaced, present_version(replaced))
    else:
        replaced.rename(export)
        sync(export.parent)


def interrupted_replacement(export: Path) -> Path | None:
    """The folder of the replaced version, if a replacement was interrupted before the new one took its place."""
    replaced = _folder_being_replaced(export)
    return replaced if replaced.exists() and not export.exists() else None


def roll_back(folder: str | Path, number: int | None = None) -> Manifest:
    """Bring back an earlier version of an export: version `number`, or the one that the present version replaced.

    The present version becomes one of the earlier ones. Raises AdapterError if `folder` is no export or the earlier
    version is damaged, and ConfigError if the version is not kept.
    """
    export = Path(folder).resolve()
    finish_replacement(export)
    if not is_export(export):
        read_manifest(export)  # raises, with the remedy
    folder_of_version = earlier_versions(export)
    numbers_text = ", ".join(map(str, folder_of_version))
    chosen = _replaced_by_present(export, folder_of_version) if number is None else number
    if chosen not in folder_of_version:
        kept = f"These are kept: {numbers_text}." if folder_of_version else "It keeps no earlier version."
        remedy = f"{kept} To export a checkpoint again: --step N."
        if chosen == 0:
            raise ConfigError("roll_back", None, f"is missing: {folder} replaced no version", remedy)
        raise ConfigError("roll_back", chosen, f"is not an earlier version of {folder}", remedy)

    # A damaged version must not take the place of one that works.
    earlier = folder_of_version[chosen]
    try:
        manifest = read_manifest(earlier)
        for policy in manifest.policies:
            check_files(earlier, policy)
    except AdapterError as error:
        remedy = f"Name another version (kept: {numbers_text}), or export a checkpoint with --step N."
        raise AdapterError(f"Version {chosen} of {folder} is damaged: {error.cause}", remedy) from None
    replace_export(export, earlier)
    return manifest


def _replaced_by_present(export: Path, earlier: dict[int, Path]) -> int:
    """The number of the version before the present one; 0 for none. If roles.json is broken, the newest kept one."""
    try:
        return read_manifest(export).replaced_version
    except AdapterError:
        return max(earlier, default=0)


def _folder_being_replaced(export: Path) -> Path:
    """The temporary folder of the version that is being replaced. Its name is fixed, to find it after a crash."""
    return export.with_name(f".{export.name}.replaced")


def _keep_as_earlier(export: Path, replaced: Path, number: int) -> None:
    """Move the version in the folder `replaced` into the export's folder of earlier versions, as version `number`.

    The earlier versions that are in `replaced` move too. The oldest versions beyond the limit are removed.
    """
    versions = export / VERSIONS
    if (replaced / VERSIONS).is_dir():
        (replaced / VERSIONS).rename(versions)
    versions.mkdir(exist_ok=True)
    free_number = number
    if (versions / str(number)).exists():  # somebody copied folders
        free_number = max(earlier_versions(export)) + 1
    replaced.rename(versions / str(free_number))
    sync(versions)
    sync(export)
    sync(export.parent)

    # The next roll-back returns to the version just replaced, so that one stays even if its number is the lowest.
    policies = read_manifest(export).policies
    has_whole_models = any(policy.folder and policy.lora is None for policy in policies)
    limit = EARLIER_MODELS if has_whole_models else EARLIER_ADAPTERS
    older_versions = [version for version in earlier_versions(export) if version != free_number]
    n_versions = len(older_versions) + 1  # with the version just replaced
    n_to_remove = max(0, n_versions - limit)
    for version in older_versions[:n_to_remove]:
        shutil.rmtree(versions / str(version))
