"""Sizes of models that were measured before, kept on disk.

A measurement loads transformers' and PEFT's model classes, which takes most of the time of `cotune doctor`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from cotune.records.policies import LoraSpec
from cotune.storage.state_folder import state_folder
from cotune.trainer.before.doctor.model_size import ModelSize, measure_folder

PACKAGES = ("torch", "transformers", "peft")
"""Libraries whose versions decide what a pass keeps."""
TRAINER = Path(__file__).parents[2]
SOURCES = ("learner", "before/doctor")
"""Folders of the trainer with the code of passes and of the measurement."""


def known_size(
    folder: Path, lora: LoraSpec | None, dtype: str, *, joined: bool = False, device: str = "cpu"
) -> ModelSize:
    """As `measure_folder`, which is called once for each model, adapter, precision, device and version of the code.

    Sizes are files in `model_sizes` of the state folder. A model that brings its own code is measured each time.
    """
    try:
        config = (folder / "config.json").read_bytes()
    except OSError:
        config = b""
    if not config or b'"auto_map"' in config:
        return measure_folder(folder, lora, dtype, joined=joined, device=device)

    asked = msgspec.json.encode([lora, dtype, joined, device, _versions()])
    key = hashlib.sha256(config + asked).hexdigest()[:32]
    file = state_folder() / "model_sizes" / f"{key}.json"
    with contextlib.suppress(OSError, msgspec.DecodeError, msgspec.ValidationError):
        return msgspec.json.decode(file.read_bytes(), type=ModelSize)

    size = measure_folder(folder, lora, dtype, joined=joined, device=device)
    # Without a place to write to, the next call measures again.
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(msgspec.json.encode(size))
        unfinished.replace(file)
    return size


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
        for file in sorted((TRAINER / name).rglob("*.py")):
            digest.update(file.read_bytes())
    return [*versions, digest.hexdigest()]
