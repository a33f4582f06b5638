"""A model in GGUF form is unpacked once, and is then like any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cotune.errors import ConfigError
from cotune.integrations.models.folder.folder import context_length, locate_model, read_parameters
from cotune.integrations.models.folder.gguf import public_name
from tests.integrations.models.folder.tiny_gguf import write_gguf

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_file_becomes_a_folder_once(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = write_gguf(tmp_path / "tiny.gguf")
    folder = locate_model(tmp_path / "tiny.gguf")
    assert folder.parent == cache / "cotune" / "models"
    assert [record.getMessage() for record in caplog.records] == [
        f"Unpacking tiny.gguf into {folder}, once",
        "It takes 1 MB there, for later runs too; you may remove it",
    ]
    assert "GGUF tensors" not in capfd.readouterr().err  # no progress bar
    weights = read_parameters(folder)
    assert weights.keys() == dict(model.named_parameters()).keys()
    assert all((weights[name] == tensor.detach().numpy()).all() for name, tensor in model.named_parameters())
    read = AutoTokenizer.from_pretrained(folder)
    said = [{"role": "user", "content": "rain and sun: 12"}]
    assert read.apply_chat_template(said)["input_ids"] == tokenizer.apply_chat_template(said)["input_ids"]
    assert read.eos_token == "<|im_end|>"
    ids = torch.tensor([[5, 9, 200, 17]])
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(folder)(ids).logits
        assert torch.allclose(found, model(ids).logits, atol=1e-5)
    caplog.clear()
    assert locate_model(str(tmp_path)) == folder  # the folder that holds the one file
    assert not caplog.records
    assert [entry.name for entry in folder.parent.iterdir()] == [folder.name]


def test_without_weights_only_the_tokenizer_is_unpacked(tmp_path: Path, cache: Path) -> None:
    _, tokenizer = write_gguf(tmp_path / "tiny.gguf")
    folder = locate_model(tmp_path / "tiny.gguf", weights=False)
    assert not [*cache.rglob("*.safetensors")] and context_length(folder) > 0
    said = [{"role": "user", "content": "rain and sun: 12"}]
    read = AutoTokenizer.from_pretrained(folder)
    assert read.apply_chat_template(said)["input_ids"] == tokenizer.apply_chat_template(said)["input_ids"]
    whole = locate_model(tmp_path / "tiny.gguf")
    assert locate_model(tmp_path / "tiny.gguf", weights=False) == whole != folder


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Qwen/Qwen3-1.7B", "Qwen/Qwen3-1.7B"),
        ("/home/me/.cache/huggingface/hub/models--Qwen--Qwen3-1.7B/snapshots/70d244cc", "Qwen/Qwen3-1.7B"),
        ("/home/me/.cache/cotune/models/SmolLM2-135M.Q4_1-0123456789abcdef", "SmolLM2-135M.Q4_1.gguf"),
        ("/data/models/my-base", "my-base"),
    ],
)
def test_a_name_for_others_has_no_folder_of_this_machine(model: str, name: str) -> None:
    assert public_name(model) == name


def test_several_files_in_a_folder_are_named(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=r"holds several models: a\.gguf, b\.gguf\. Give the path"):
        locate_model(tmp_path)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\0\0\0" + b"\xff" * 64, b"not a model at all" * 10])
def test_a_file_that_is_none(tmp_path: Path, cache: Path, content: bytes) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"broken\.gguf.*not a GGUF file of an architecture that transformers reads"):
        locate_model(file)
    assert [*(cache / "cotune" / "models").iterdir()] == []


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"cannot be unpacked into .*set XDG_CACHE_HOME"):
        locate_model(tmp_path / "tiny.gguf")
