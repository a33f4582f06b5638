"""The precision of a run on a GPU, on one that does not multiply bfloat16, and after a move between CPU and GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cotune.config.train import TrainConfig
from cotune.integrations.models import bfloat16
from cotune.storage.run_layout import Precision, read_run
from cotune.trainer.config.load import convert
from cotune.trainer.learner import load
from cotune.trainer.run.precision import auto_dtype, decide_precision, gap_remedy, keep_precision, without_sampler
from cotune.trainer.run.run_folder import RunFolder

AUTO = {"dtype": "auto"}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    created = RunFolder.create(tmp_path / "run", convert({"model": "m"}), workflow=None, tasks=None)
    yield created
    created.close()


def pretend_gpu(
    monkeypatch: pytest.MonkeyPatch, name: str = "NVIDIA H100", *, multiplies_bfloat16: bool = True
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: name)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: multiplies_bfloat16)


def config_of(base: str, **more: object) -> TrainConfig:
    return convert({"model": base, "learner": AUTO, **more})


@pytest.mark.parametrize(
    ("device", "multiplies_bfloat16", "more", "expected"),
    [
        ("cuda", True, {}, "bfloat16"),
        ("cuda", True, {"policies": "full"}, "bfloat16"),
        ("cuda", True, {"cluster": {"address": "local", "gpus_per_engine": 0.5}}, "bfloat16"),
        ("cuda", False, {}, "float32"),
        ("cpu", True, {}, "bfloat16"),
        ("cpu", True, {"policies": "full"}, "float32"),
        ("cpu", True, {"cluster": {"address": "local"}}, "float32"),
        ("cpu", False, {}, "float32"),
    ],
)
def test_what_auto_is_on_each_device(
    base: str,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    multiplies_bfloat16: bool,
    more: dict[str, object],
    expected: str,
) -> None:
    monkeypatch.setattr(bfloat16, "LARGE", 1)
    assert auto_dtype(config_of(base, **more), device, multiplies_bfloat16=multiplies_bfloat16) == expected


def test_a_run_on_a_gpu_is_in_bfloat16(folder: RunFolder, base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch)
    config, chosen, notes = decide_precision(folder, config_of(base))
    assert (config.learner.dtype, notes) == ("bfloat16", [])
    assert chosen == read_run(folder.path).precision == Precision(dtype="bfloat16", device="cuda")


def test_a_gpu_without_bfloat16_says_what_float32_costs(
    folder: RunFolder, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu(monkeypatch, "Tesla T4", multiplies_bfloat16=False)
    config, _, notes = decide_precision(folder, config_of(base))
    assert config.learner.dtype == "float32"
    assert len(notes) == 1
    assert notes[0].startswith(
        "Tesla T4 does not multiply bfloat16, so the learner computes in float32: frozen weights"
    )


def test_a_run_that_moves_from_the_cpu_to_a_gpu_says_what_changes(
    folder: RunFolder, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_precision(folder, Precision(dtype="float32"))
    pretend_gpu(monkeypatch)
    config, chosen, notes = decide_precision(folder, config_of(base))
    assert config.learner.dtype == "bfloat16"
    assert "has trained on the CPU in float32 and continues on a GPU in bfloat16" in notes[0]
    assert chosen is not None
    assert chosen.gap is None  # so sampler and learner are compared again
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(bfloat16, "has_bfloat16", lambda: False)
    config, _, notes = decide_precision(folder, config_of(base))
    assert config.learner.dtype == "float32"
    assert "has trained on a GPU in bfloat16 and continues on the CPU in float32" in notes[0]


def test_a_run_that_fell_back_stays_in_float32_on_a_gpu(
    folder: RunFolder, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_precision(folder, Precision(dtype="float32", gap=0.06, fell_back=True))
    pretend_gpu(monkeypatch)
    config, chosen, _ = decide_precision(folder, config_of(base))
    assert config.learner.dtype == "float32"
    assert chosen == Precision(dtype="float32", device="cuda", gap=0.06, fell_back=True)


def test_without_a_sampler_auto_is_bfloat16_on_a_gpu_alone(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bfloat16, "LARGE", 1)
    assert without_sampler(config_of(base)).learner.dtype == "float32"
    pretend_gpu(monkeypatch)
    assert without_sampler(config_of(base)).learner.dtype == "bfloat16"
    assert without_sampler(config_of(base, learner={"dtype": "float32"})).learner.dtype == "float32"


SERVER = {"engine": "http://host:8000"}


@pytest.mark.parametrize(
    ("on_gpu", "more", "steps"),
    [
        (False, {"learner": {"dtype": "float32"}}, []),
        (False, {"learner": {"dtype": "bfloat16"}}, ['learner.dtype = "float32".', "Raise probe_bound"]),
        (True, {"learner": {"dtype": "float32"}}, ["Raise probe_bound"]),
        (True, {"learner": {"dtype": "bfloat16"}}, ['learner.dtype = "float32", which takes twice', "probe_bound"]),
        (
            True,
            {"learner": {"dtype": "bfloat16"}, **SERVER},
            ['{"head_dtype": "float32"}', 'learner.dtype = "float32", which takes', "probe_bound"],
        ),
        (
            True,
            {"learner": {"dtype": "float32"}, "engine": "mine:open"},
            ["Let mine:open compute logits in float32.", "probe_bound"],
        ),
        (
            True,
            {"learner": {"dtype": "bfloat16", "quantize": "4bit"}},
            ['learner.quantize = "none"', 'learner.dtype = "float32"', "probe_bound"],
        ),
    ],
)
def test_the_remedy_names_what_helps_on_this_machine(
    base: str, monkeypatch: pytest.MonkeyPatch, on_gpu: bool, more: dict[str, object], steps: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    remedy = gap_remedy(convert({"model": base, "engine": "transformers", **more}))
    places = [remedy.find(step) for step in steps]
    assert -1 not in places
    assert places == sorted(places)
    assert bool(remedy) == bool(steps)
    if '"float32"' not in "".join(steps):
        assert "learner.dtype" not in remedy


def test_float32_products_are_in_tf32_in_a_process_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", asked.append)
    load.allow_tf32(torch.device("cpu"))
    assert asked == []
    load.allow_tf32(torch.device("cuda"))
    assert asked == ["high"]
