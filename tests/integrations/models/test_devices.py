"""A GPU that is there and not used is named with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cotune.integrations.models import devices
from cotune.integrations.models.devices import device_name, untried_gpu, unused_gpu


@pytest.fixture(autouse=True)
def no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "NVIDIA", tmp_path / "nvidia")
    monkeypatch.setattr(devices, "AMD", tmp_path / "kfd")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_nothing_is_said_where_no_gpu_is_there_or_torch_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert unused_gpu() == ""
    (tmp_path / "nvidia" / "0000:01:00.0").mkdir(parents=True)
    assert unused_gpu() != ""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert unused_gpu() == ""


def test_why_torch_does_not_see_a_gpu_of_nvidia(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(2):
        (tmp_path / "nvidia" / f"0000:0{number}:00.0").mkdir(parents=True)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "2 GPUs of NVIDIA are in this machine" in unused_gpu() and "is built without CUDA" in unused_gpu()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "nvidia-smi" in unused_gpu()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES is ''" in unused_gpu()


def test_gpus_of_amd_and_apple_have_a_sentence_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kfd").touch()
    monkeypatch.setattr(torch.version, "hip", None)
    assert "install torch's build for ROCm" in unused_gpu()
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert "Apple's GPU is not used" in unused_gpu()


def test_a_gpu_of_amd_that_torch_uses_is_said_to_be_untried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.1")
    assert untried_gpu() == ""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "ROCm, but nobody has tried it" in untried_gpu()
    monkeypatch.setattr(torch.version, "hip", None)
    assert untried_gpu() == ""


def test_devices_have_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_name() == "the CPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: ["H200", "T4"][index])
    assert device_name() == "GPU 0 (H200)"
