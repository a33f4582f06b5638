"""Fingerprints of base models, by content and never by path.

Weights are hashed tensor by tensor, so that the same model in other shards has the same fingerprint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from cotune.errors import AdapterError
from cotune.storage.checkpoints import CHECKPOINT, read_identity, steps_of
from cotune.storage.run_layout import EARLIER

HASHES = "hashes.json"
"""File of a checkpoint that holds the hash of every other one, by its path in the folder."""
_HASHING_THREADS = 4
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
_VOLATILE = {"transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache", "_attn_implementation"}


class BaseFingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """SHA-256, in hex, of each part of a model folder that an adapter depends on."""

    weights: str
    config: str
    tokenizer: str
    chat_template: str

    def differences(self, other: BaseFingerprint) -> list[str]:
        """Names of the parts that differ."""
        return [name for name in self.__struct_fields__ if getattr(self, name) != getattr(other, name)]


def differing_parts(recorded: Mapping[str, str], present: Mapping[str, str]) -> list[str]:
    """Names of the parts of a base model whose digest differs from the one that a run or an export recorded."""
    return [part for part, digest in recorded.items() if present.get(part) != digest]


def base_fingerprint(folder: Path) -> BaseFingerprint:
    """Fingerprint of a model folder. Raises AdapterError if it has no config or no weights."""
    config = folder / "config.json"
    if not config.is_file():
        raise AdapterError(f"{folder} has no config.json.", "Name a Hugging Face model folder.")
    # Libraries rewrite these settings when they save a model; they do not change its output.
    settings = {name: value for name, value in _read_object(config).items() if name not in _VOLATILE}
    tokenizer = "".join(f"{name} {digest}\n" for name, digest in hashes_of(folder, _TOKENIZER_FILES).items())
    tensors: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(_tensor_digests(path))
    if not tensors:
        raise AdapterError(f"{folder} holds no weights.", "Name a folder with *.safetensors files.")
    parts = {
        "weights": "".join(f"{name} {tensors[name]}\n" for name in sorted(tensors)),
        "config": json.dumps(settings, sort_keys=True),
        "tokenizer": tokenizer,
        "chat_template": chat_template(folder),
    }
    hashed = {name: hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest() for name, text in parts.items()}
    return BaseFingerprint(**hashed)


def chat_template(folder: Path) -> str:
    """Text of the chat template of a model folder; empty if it has none."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(errors="surrogateescape")
    settings = folder / "tokenizer_config.json"
    template: Any = _read_object(settings).get("chat_template") if settings.is_file() else None
    if isinstance(template, str):
        return template
    # Some models have several named templates, as a list of objects.
    return json.dumps(template, sort_keys=True) if template else ""


def _read_object(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object. Raises AdapterError if it does not."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise AdapterError(f"{path} is no JSON object.", "Fetch or export the model again.")
    return content


def _tensor_digests(path: Path) -> Iterator[tuple[str, str]]:
    """Name and digest of each tensor of a safetensors file."""
    from safetensors import SafetensorError, safe_open
    from torch import uint8

    try:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118, it is no mapping
                piece = file.get_slice(name)
                data = file.get_tensor(name).reshape(-1).view(uint8).numpy()
                yield name, f"{piece.get_dtype()} {piece.get_shape()} {hashlib.sha256(data).hexdigest()}"
    except SafetensorError as error:
        text = f"{path} is no safetensors file, or is cut short: {error}."
        raise AdapterError(text, "Fetch or export the model again.") from None


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hashes_of(folder: Path, names: Iterable[str] | None = None) -> dict[str, str]:
    """SHA-256 of files of a folder, by path in the folder.

    `names` selects the files; None means all of them. Missing files are left out.
    """
    if names is None:
        selected = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    else:
        selected = [name for name in names if (folder / name).is_file()]
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        return dict(zip(selected, pool.map(lambda name: file_sha256(folder / name), selected), strict=True))


def write_hashes(folder: Path) -> None:
    """Write `hashes.json` with the hash of every other file in the folder."""
    (folder / HASHES).unlink(missing_ok=True)
    (folder / HASHES).write_bytes(msgspec.json.format(msgspec.json.encode(hashes_of(folder)), indent=2))


def files_fault(folder: Path, expected: Mapping[str, str] | None = None, source: str = HASHES) -> str | None:
    """Describe the first file that is missing or has another hash; None if all files are unchanged.

    `expected` are hashes by path, which stand in the file `source`; by default the content of `hashes.json`.
    """
    listed = expected
    if listed is None:
        try:
            listed = msgspec.json.decode((folder / HASHES).read_bytes(), type=dict[str, str])
        except OSError as error:
            return f"{HASHES} cannot be read: {error.strerror}"
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return f"{HASHES} is broken: {error}"
    present = hashes_of(folder, listed)
    for name, digest in listed.items():
        if name not in present:
            return f"{name} is missing"
        if present[name] != digest:
            return f"{name} has SHA-256 {present[name]}, {source} says {digest}"
    return None


def checkpoint_fault(checkpoint: Path, run: str) -> str | None:
    """Describe the first fault of a checkpoint of the run with the id `run`; None for an intact checkpoint.

    A fault is a changed file, a file that has no hash, or a checkpoint of another run or another step.
    """
    fault = files_fault(checkpoint)
    if fault:
        return fault
    listed = msgspec.json.decode((checkpoint / HASHES).read_bytes(), type=dict[str, str])
    for path in sorted(checkpoint.rglob("*")):
        name = path.relative_to(checkpoint).as_posix()
        is_hidden = path.name.startswith(".")
        needs_hash = path.is_file() and not is_hidden and name != HASHES
        if needs_hash and name not in listed:
            return f"{name} is not in {HASHES}"
    identity = read_identity(checkpoint)
    if identity is None:
        return f"{CHECKPOINT} cannot be read"
    if not identity.run:
        return f"it does not name its run; {EARLIER} reads it"
    if identity.run != run:
        return f"it is of another run: {identity.run}, this one is {run or 'without an id'}"
    if identity.steps != steps_of(checkpoint):
        return f"it is the checkpoint after {identity.steps} steps"
    return None
