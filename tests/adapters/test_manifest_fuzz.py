"""Manifests and base models with fields mistyped, missing and odd: one clear error, or what the export really is."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from cotune.adapters.fingerprint import base_fingerprint
from cotune.adapters.load import load_export
from cotune.errors import CotuneError
from tests.mutations import as_json, damaged, mutated


def odd(rng: random.Random, raw: bytes) -> bytes:
    """A JSON file with odd values, or damaged as bytes."""
    return damaged(rng, raw) if rng.random() < 0.2 else as_json(mutated(rng, json.loads(raw)))


@pytest.mark.parametrize("count", [150, pytest.param(10_000, marks=pytest.mark.long)])
def test_a_manifest(export: Path, tmp_path: Path, count: int) -> None:
    folder = Path(shutil.copytree(export, tmp_path / "export"))
    rng, whole, refused = random.Random(3), (folder / "roles.json").read_bytes(), 0
    for _ in range(count):
        (folder / "roles.json").write_bytes(odd(rng, whole))
        try:
            loaded = load_export(folder)
            for policy in loaded.manifest.policies:
                loaded.weights(policy)
        except CotuneError as error:
            refused += 1
            assert "\n" not in str(error), error
    assert refused > count / 2


@pytest.mark.parametrize("count", [60, pytest.param(10_000, marks=pytest.mark.long)])
def test_a_base_model(base: Path, tmp_path: Path, count: int) -> None:
    folder = Path(shutil.copytree(base, tmp_path / "base"))
    rng, same = random.Random(4), 0
    own = base_fingerprint(folder)
    for _ in range(count):
        name = rng.choice(["config.json", "tokenizer_config.json", "model.safetensors", "chat_template.jinja"])
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(odd(rng, whole) if name.endswith(".json") else header_changed(rng, whole))
        try:
            same += base_fingerprint(folder) == own
        except CotuneError as error:
            assert "\n" not in str(error), error
        (folder / name).write_bytes(whole)
    assert same < count / 2


def header_changed(rng: random.Random, raw: bytes) -> bytes:
    """The first kilobyte damaged, where a safetensors file says what it holds."""
    return damaged(rng, raw[:1000]) + raw[1000:]
