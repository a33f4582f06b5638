"""A model is measured once, and its size is read from disk after that."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cotune.cli.main import main
from cotune.records.policies import LoraSpec
from cotune.trainer.before.doctor import size_cache
from cotune.trainer.before.doctor.model_size import ModelSize
from cotune.trainer.before.doctor.size_cache import known_size
from tests.trainer.before.doctor.test_memory import BILLION

LORA = LoraSpec()


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def measured(state: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments of all measurements."""
    calls: list[Any] = []

    def measure(folder: Path, lora: LoraSpec | None, dtype: str, **options: Any) -> ModelSize:
        calls.append((folder, lora, dtype, options))
        return BILLION

    monkeypatch.setattr(size_cache, "measure_folder", measure)
    return calls


def model(folder: Path, text: str = '{"model_type": "qwen3"}') -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(text)
    return folder


def test_a_model_is_measured_once(measured: list[Any], tmp_path: Path) -> None:
    one, copy = model(tmp_path / "one"), model(tmp_path / "copy")
    sizes = [known_size(folder, LORA, "float32") for folder in (one, one, copy)]
    assert sizes == [BILLION] * 3
    assert measured == [(one, LORA, "float32", {"joined": False, "device": "cpu"})]


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: known_size(model(folder, '{"model_type": "llama"}'), LORA, "float32"),
        lambda folder: known_size(folder, LoraSpec(rank=8), "float32"),
        lambda folder: known_size(folder, None, "float32"),
        lambda folder: known_size(folder, LORA, "bfloat16"),
        lambda folder: known_size(folder, LORA, "float32", joined=True),
        lambda folder: known_size(folder, LORA, "float32", device="cuda"),
    ],
    ids=["model", "rank", "full", "dtype", "joined", "device"],
)
def test_another_question_is_measured(measured: list[Any], tmp_path: Path, change: Callable[[Path], ModelSize]) -> None:
    folder = model(tmp_path / "model")
    known_size(folder, LORA, "float32")
    change(folder)
    assert len(measured) == 2


def test_other_code_or_libraries_measure_again(
    measured: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model(tmp_path / "model")
    known_size(folder, LORA, "float32")
    monkeypatch.setattr(size_cache, "SOURCES", ("trainer/learner",))
    known_size(folder, LORA, "float32")
    monkeypatch.setattr(size_cache, "version", lambda package: "0.0.1")
    known_size(folder, LORA, "float32")
    assert len(measured) == 3


OWN_CODE = '{"auto_map": {"AutoModelForCausalLM": "own.Model"}}'


def test_a_model_with_its_own_code_is_measured_again_if_the_code_changes(measured: list[Any], tmp_path: Path) -> None:
    folder = model(tmp_path / "model", OWN_CODE)
    (folder / "layers").mkdir()
    for name, text in (("own.py", "a"), ("own.py", "a"), ("own.py", "b"), ("layers/mlp.py", ""), ("own.py", "a")):
        (folder / name).write_text(text)
        known_size(folder, LORA, "float32")
        known_size(folder, LORA, "float32")
    assert len(measured) == 4


@pytest.mark.parametrize(
    "text", [OWN_CODE.replace("own.Model", "owner/other--own.Model"), "no JSON"], ids=["elsewhere", "broken"]
)
def test_a_model_whose_code_is_not_in_its_folder_is_measured_each_time(
    measured: list[Any], tmp_path: Path, text: str
) -> None:
    folder = model(tmp_path / "model", text)
    known_size(folder, LORA, "float32")
    known_size(folder, LORA, "float32")
    assert len(measured) == 2


def test_a_broken_file_is_written_again(measured: list[Any], state: Path, tmp_path: Path) -> None:
    folder = model(tmp_path / "model")
    known_size(folder, LORA, "float32")
    [file] = (state / "cotune" / "model_sizes").iterdir()
    for text in ("{", "{}"):
        file.write_text(text)
        assert known_size(folder, LORA, "float32") == BILLION
    assert known_size(folder, LORA, "float32") == BILLION
    assert len(measured) == 3


def test_without_a_place_to_write_to_each_call_measures(
    measured: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(file))
    folder = model(tmp_path / "model")
    sizes = [known_size(folder, LORA, "float32") for _ in range(2)]
    assert sizes == [BILLION, BILLION]
    assert len(measured) == 2


def test_the_doctor_of_a_known_model_loads_no_model_classes(
    state: Path, tiny_base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["doctor", "--model", str(tiny_base), "--gpu", "24"]
    main(command)
    first = capsys.readouterr().out
    code = (
        f"import sys; from cotune.cli.main import main; main({command!r}); "
        "heavy = {'transformers.modeling_utils', 'peft', 'vllm'} & set(sys.modules); sys.exit(str(heavy or ''))"
    )
    environment = {**os.environ, "XDG_STATE_HOME": str(state)}
    again = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert again.stderr.strip() == ""
    memory = first[first.index("memory, estimated") :]
    assert again.stdout[again.stdout.index("memory, estimated") :] == memory
