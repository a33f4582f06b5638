"""Which folder a model name stands for, and what is said where there is none."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest

from cotune.errors import ConfigError
from cotune.integrations.models.folder.folder import locate_model


def test_a_folder_stands_for_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert locate_model(tmp_path) == tmp_path.resolve()


@pytest.mark.parametrize("model", ["/nowhere", "./models/nothing", "~/nothing", "a/b/c", "adaptors", "adaptors/"])
def test_a_path_without_a_model_is_not_asked_for_anywhere(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    with pytest.raises(ConfigError, match=r"is not a model folder or GGUF file: there is no such folder\."):
        locate_model(model)


def test_a_name_in_a_folder_that_is_there_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "first").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"there is no such folder\. Did you mean runs/first\? An id has the form"):
        locate_model("runs/frist")


def test_an_adapter_is_told_from_a_model_with_what_to_name_instead(tmp_path: Path) -> None:
    (role := tmp_path / "writer").mkdir()
    (role / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"it is an adapter\. Use its base model\."):
        locate_model(role)
    (tmp_path / "roles.json").write_text("{}")
    with pytest.raises(ConfigError) as caught:
        locate_model(role)
    assert caught.value.remedy == f"Use the export, {tmp_path}."


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("run.json", r"it is a run folder\. Export it first: cotune export .*/x --out"),
        ("roles.json", "it is an export"),
    ],
)
def test_a_run_and_an_export_are_told_from_a_model(tmp_path: Path, file: str, said: str) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / file).write_text("{}")
    with pytest.raises(ConfigError, match=said):
        locate_model(tmp_path / "x")


def test_an_id_that_cannot_be_fetched_says_why_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: object, **options: object) -> str:
        raise FileNotFoundError("Got: ConnectError: no such host\nPlease check your internet connection.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ConfigError) as raised:
        locate_model("Some/Model")
    assert "model = 'Some/Model'" in str(raised.value)
    assert "(FileNotFoundError: Got: ConnectError: no such host)" in str(raised.value)
    assert "`hf download`" in str(raised.value)
