"""Sizes of models that were measured before, kept on disk.

A measurement loads transformers' and PEFT's model classes, which takes most of the time of `cotune doctor`.
"""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from cotune.records.policies import LoraSpec
from cotune.storage.state_folder import load_result, store_result
from cotune.trainer.before.doctor.model_size import ModelSize, measure_folder

PACKAGES = ("torch", "transformers", "peft")
"""Libraries whose versions decide the sizes of a pass."""
PACKAGE = Path(__file__).parents[3]
SOURCES = ("trainer/learner", "trainer/before/doctor", "integrations/models/folder")
"""Folders with the code of passes, of the measurement and of the sizes that follow from a configuration."""


def known_size(
    folder: Path, lora: LoraSpec | None, dtype: str, *, joined: bool = False, device: str = "cpu"
) -> ModelSize:
    """The size of the model in a folder, with the arguments of `measure_folder`. It is measured once for each model,
    adapter, precision, device and version of the code.

    Measured sizes are stored in `model_sizes` of the state folder. A model whose code is in another repository is
    measured each time, because this code may change.
    """
    try:
        config = (folder / "config.json").read_bytes()
        own_code = _own_code(folder, config)
    except (OSError, msgspec.DecodeError):
        own_code = None
    if own_code is None:
        return measure_folder(folder, lora, dtype, joined=joined, device=device)

    key = config + own_code + msgspec.json.encode([lora, dtype, joined, device, _versions()])
    size = load_result("model_sizes", key, ModelSize)
    if size is None:
        size = measure_folder(folder, lora, dtype, joined=joined, device=device)
        store_result("model_sizes", key, size)
    return size


def _own_code(folder: Path, config: bytes) -> bytes | None:
    """A digest of the code that a model brings in its folder, for `trust_remote_code`. It is empty if the model brings
    no code, and None if the code is in another repository."""
    classes = msgspec.json.decode(config).get("auto_map", {})
    if not classes:
        return b""
    # "owner/name--module.Class" is in another repository. A tokenizer has a list of two classes.
    if "--" in str(classes):
        return None
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(f"{file.relative_to(folder)}\0".encode())
        digest.update(file.read_bytes())
    return digest.digest()


def _versions() -> list[str]:
    """Versions of the libraries, and a digest of cotune's own code."""
    versions: list[str] = []
    for package in PACKAGES:
        try:
            versions.append(version(package))
        except PackageNotFoundError:
            versions.append("")
    digest = hashlib.sha256()
    for name in SOURCES:
        for file in sorted((PACKAGE / name).rglob("*.py")):
            digest.update(file.read_bytes())
    return [*versions, digest.hexdigest()]
