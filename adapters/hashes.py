"""SHA-256 of the files of a folder: written when it is complete, and compared before anything in it is believed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

HASHES = "hashes.json"
"""File of a checkpoint that holds the hash of every other one, by its path in the folder."""
_AT_ONCE = 4


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hashes_of(folder: Path, names: Iterable[str] | None = None) -> dict[str, str]:
    """Hashes of these files of a folder, or of all in it, by path; files that are not there are left out."""
    found = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    chosen = found if names is None else [name for name in names if (folder / name).is_file()]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return dict(zip(chosen, pool.map(lambda name: file_sha256(folder / name), chosen), strict=True))


def write_hashes(folder: Path) -> None:
    """Write `hashes.json` of all else that is in the folder."""
    (folder / HASHES).unlink(missing_ok=True)
    (folder / HASHES).write_bytes(msgspec.json.format(msgspec.json.encode(hashes_of(folder)), indent=2))


def changed(folder: Path, expected: Mapping[str, str] | None = None, source: str = HASHES) -> str | None:
    """What differs from the `expected` hashes (by default those in `hashes.json`), as `source` has them; None where
    nothing does."""
    if expected is None:
        try:
            expected = msgspec.json.decode((folder / HASHES).read_bytes(), type=dict[str, str])
        except OSError as error:
            return f"{HASHES} cannot be read: {error.strerror}"
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return f"{HASHES} is broken: {error}"
    found = hashes_of(folder, expected)
    for name, digest in expected.items():
        if name not in found:
            return f"{name} is missing"
        if found[name] != digest:
            return f"{name} has SHA-256 {found[name]}, {source} says {digest}"
    return None
