"""Folders of adapters: what is written is read back, they go with their owner, and they avoid a full shared memory."""

from __future__ import annotations

import fcntl
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cotune.errors import SamplerError
from cotune.integrations.cluster import temp_dir
from cotune.integrations.cluster.temp_dir import owned_folder
from cotune.integrations.models.vllm import adapters as vllm_adapters
from cotune.integrations.models.vllm.adapters import SharedFolders, read_weights, write_shared
from cotune.records.policies import LoraSpec
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import fingerprint

STEM = "base_model.model.model.layers.0.self_attn.q_proj"
WEIGHTS = {
    f"{STEM}.lora_A.weight": np.arange(8, dtype=np.float32).reshape(2, 4),
    f"{STEM}.lora_B.weight": np.ones((4, 2), np.float32),
}
LORA = LoraSpec(rank=2, alpha=8.0)


def test_an_adapter_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    folders = SharedFolders(tmp_path)
    folder = write_shared(folders, "a/b@3#1", PolicyRef("a/b", 3), WEIGHTS, LORA)
    assert fingerprint(read_weights(folder)) == fingerprint(WEIGHTS)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (2, 8.0, ["q_proj"])
    assert re.fullmatch(r"a_b@3_1-[0-9a-f]{10}", folder.name)
    folders.remove("a/b@3#1")
    assert not folder.exists()
    folders.close()
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_fit_into_shared_memory_goes_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for size, where in ((0, "memory"), (1 << 60, "disk")):
        memory, disk = tmp_path / "memory", tmp_path / "disk"
        memory.mkdir(exist_ok=True)
        disk.mkdir(exist_ok=True)
        monkeypatch.setattr(vllm_adapters, "SHARED_MEMORY", memory)
        monkeypatch.setattr("tempfile.gettempdir", lambda disk=disk: str(disk))
        folders = SharedFolders()
        assert folders.make("x@1", size).is_relative_to(tmp_path / where)
        folders.close()


def test_a_full_disk_is_named_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.numpy.save_file", full)
    folders = SharedFolders(tmp_path)
    with pytest.raises(SamplerError, match=r"a@1 cannot be written .* No space left"):
        write_shared(folders, "a@1", PolicyRef("a", 1), WEIGHTS, LORA)
    assert [path.name for path in next(tmp_path.iterdir()).iterdir() if path.is_dir()] == []
    folders.close()


def test_folders_of_a_killed_owner_go_at_the_next_start_and_those_of_a_living_one_stay(tmp_path: Path) -> None:
    code = f"""
import os, pathlib, signal
from cotune.integrations.cluster import temp_dir
from cotune.integrations.cluster.temp_dir import owned_folder
with owned_folder(pathlib.Path({str(tmp_path)!r}), "mine") as folder:
    (folder / "weights").write_text("big")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    with owned_folder(tmp_path, "mine") as living:
        subprocess.run([sys.executable, "-c", code])
        assert len(list(tmp_path.glob("mine-*/weights"))) == 1
        with owned_folder(tmp_path, "mine") as fresh:
            assert set(tmp_path.iterdir()) == {living, fresh}
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_another_start_takes_for_a_left_one_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = fcntl.flock

    def late(file: int, how: int) -> None:
        """The other has looked between the making of the folder and its lock."""
        monkeypatch.undo()
        (made,) = tmp_path.iterdir()
        temp_dir._remove_if_free(made)
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with owned_folder(tmp_path, "mine") as folder:
        assert list(tmp_path.iterdir()) == [folder]
    assert list(tmp_path.iterdir()) == []
