"""What a run decides by its machine: the engine, and the GPUs of engines and learners."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cotune.config.train import TrainConfig
from cotune.errors import ConfigError
from cotune.integrations.models.vllm.installed import build_of, unknown_architectures
from cotune.trainer.config.load import convert
from cotune.trainer.run.division import Resources, describe_division, divide
from tests.trainer.conftest import Trainer
from tests.trainer.tiny_app import application, letters

GIB = 2.0**30
CPU = Resources(ray=True, vllm="cpu")
ONE = Resources(gpus=1, gpu_bytes=24 * GIB, ray=True, vllm="gpu", parameters=2 * 10**9)
TWO = msgspec.structs.replace(ONE, gpus=2)
EIGHT = msgspec.structs.replace(ONE, gpus=8, gpu_bytes=80 * GIB)


def but(resources: Resources, **changes: Any) -> Resources:
    return msgspec.structs.replace(resources, **changes)


def numbers(config: TrainConfig) -> tuple[str, str, float, float, float, float]:
    cluster = config.cluster
    return (
        config.engine,
        cluster.address,
        cluster.engines,
        cluster.gpus_per_engine,
        cluster.learners,
        cluster.gpus_per_learner,
    )


IN_PROCESS = ("transformers", "none", 1, 0, 1, 0)
SHARED = ("vllm", "none", 1, 0.5, 1, 0.5)
SHARED_IN_PROCESS = ("transformers", "none", 1, 0.5, 1, 0.5)
ON_TWO = ("vllm", "local", 1, 1, 1, 1)
ON_EIGHT = ("vllm", "local", 6, 1, 2, 1)
LOCAL = {"cluster": {"address": "local"}}
HALVES = {"cluster": {"gpus_per_engine": 0.5}}


@pytest.mark.parametrize(
    ("resources", "settings", "expected", "noted"),
    [
        # No GPU.
        (CPU, {}, IN_PROCESS, ""),
        (but(CPU, vllm="", ray=False), {}, IN_PROCESS, ""),
        (CPU, {"engine": "vllm"}, ("vllm", "none", 1, 0, 1, 0), ""),
        (CPU, LOCAL, ("vllm", "local", 1, 0, 1, 0), ""),
        (but(CPU, vllm=""), LOCAL, ("transformers", "local", 1, 0, 1, 0), "vLLM is not installed"),
        (CPU, {"cluster": {"engines": 3, "learners": 2}}, ("vllm", "local", 3, 0, 2, 0), ""),
        # One GPU.
        (ONE, {}, SHARED, ""),
        (but(ONE, ray=False), {}, SHARED, ""),
        (but(ONE, vllm=""), {}, SHARED_IN_PROCESS, "vLLM is not installed"),
        (but(ONE, vllm="cpu"), {}, SHARED_IN_PROCESS, "built for the CPU"),
        (but(ONE, unknown_to_vllm=("OddModel",)), {}, SHARED_IN_PROCESS, "vLLM does not know OddModel"),
        (but(ONE, unknown_to_vllm=("OddModel",)), {"engine": "vllm"}, SHARED, ""),
        (ONE, {"engine": "transformers"}, SHARED_IN_PROCESS, ""),
        (ONE, {"mode": "async"}, SHARED_IN_PROCESS, "mode async"),
        (ONE, {"policies": "full"}, SHARED_IN_PROCESS, "room for one engine"),
        (ONE, {"policies": "full", "roles": ["solver"]}, SHARED, ""),
        (ONE, LOCAL, ("vllm", "local", 1, 0.5, 1, 0.5), ""),
        (ONE, {"cluster": {"engines": 1, "rollout_workers": 4}}, ("vllm", "local", 1, 0.5, 1, 0.5), ""),
        (
            ONE,
            {"engine": "http://host:8000"},
            ("http://host:8000", "none", 1, 0, 1, 1),
            "",
        ),
        (ONE, {"recipe": "sft", "records": {"path": "runs/a"}}, ("transformers", "none", 1, 0, 1, 1), ""),
        # Several GPUs.
        (TWO, {}, ON_TWO, ""),
        (TWO, {"mode": "async"}, ON_TWO, ""),
        (EIGHT, {}, ON_EIGHT, ""),
        (EIGHT, LOCAL, ON_EIGHT, ""),
        (EIGHT, {"cluster": {"learners": 4}}, ("vllm", "local", 4, 1, 4, 1), ""),
        (EIGHT, {"cluster": {"engines": 2}}, ("vllm", "local", 2, 1, 6, 1), ""),
        (EIGHT, {"cluster": {"gpus_per_engine": 2}}, ("vllm", "local", 3, 2, 2, 1), ""),
        (EIGHT, {**HALVES, "mode": "async"}, ("transformers", "local", 1, 0.5, 1, 0.5), "mode async"),
        (EIGHT, {"cluster": {"address": "none"}}, SHARED, "1 of 8 GPUs used: cluster.address is none"),
        (but(EIGHT, ray=False), {}, SHARED, "1 of 8 GPUs used: Ray, .*is not installed"),
        (but(EIGHT, ray=False, vllm=""), {}, SHARED_IN_PROCESS, "1 of 8 GPUs used: Ray"),
        (but(EIGHT, vllm=""), {}, SHARED_IN_PROCESS, "1 of 8 GPUs used: vLLM is not installed"),
        (but(EIGHT, unknown_to_vllm=("OddModel",)), {}, SHARED_IN_PROCESS, "1 of 8 .*does not know OddModel"),
        (but(EIGHT, unknown_to_vllm=("OddModel",)), LOCAL, ("transformers", "local", 6, 1, 2, 1), "OddModel"),
        (but(EIGHT, importable=False), {}, SHARED, "cannot import the application"),
        (EIGHT, {"learner": {"quantize": "4bit"}}, SHARED, "learner.quantize needs a learner in one process"),
        (EIGHT, {"recipe": "distill", "distill": {"teacher": "large"}}, SHARED, "the teacher large is loaded in this"),
        (
            EIGHT,
            {"recipe": "distill", "distill": {"teacher": "large"}, **LOCAL},
            ON_EIGHT,
            "the teacher large is loaded",
        ),
        (EIGHT, {"engine": "transformers"}, SHARED_IN_PROCESS, "engine is transformers"),
        (
            EIGHT,
            {"engine": "http://host:8000"},
            ("http://host:8000", "local", 1, 0, 8, 1),
            "",
        ),
        (EIGHT, {"recipe": "sft", "records": {"path": "runs/a"}}, ("transformers", "local", 1, 0, 8, 1), ""),
        # Large models: 70B in bfloat16 takes 140 GB; full weights take 16 bytes a parameter, and an engine each.
        (but(EIGHT, parameters=70 * 10**9), {}, ("vllm", "local", 1, 4, 4, 1), ""),
        (EIGHT, {"policies": "full", "roles": ["a", "b"]}, ("vllm", "local", 3, 1, 2, 1), ""),
        (TWO, {"policies": "full", "roles": ["a", "b"]}, SHARED_IN_PROCESS, "need 3, as each base"),
        (but(EIGHT, gpus=16, gpu_bytes=0.0), {"cluster": {"address": "auto"}}, ("vllm", "auto", 12, 1, 4, 1), ""),
    ],
)
def test_the_machine_decides_what_the_configuration_leaves_open(
    resources: Resources, settings: dict[str, Any], expected: tuple[Any, ...], noted: str
) -> None:
    config, notes = divide(convert({"model": "m", **settings}), resources)
    assert numbers(config) == expected
    if noted:
        assert re.search(noted, " ".join(notes))
    else:
        assert notes == ()
    again, _ = divide(config, resources)
    assert numbers(again) == expected


def test_an_engine_that_sleeps_cannot_sample_ahead() -> None:
    with pytest.raises(ConfigError, match=r"mode = 'async' must be sync if vllm shares a GPU.* Set engine"):
        divide(convert({"model": "m", "mode": "async", "engine": "vllm"}), ONE)


def test_numbers_that_a_run_without_ray_cannot_have_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.gpus_per_engine = 1.* needs Ray: without it, it is 0\.5"):
        divide(convert({"model": "m", "cluster": {"address": "none", "gpus_per_engine": 1}}), ONE)
    with pytest.raises(ConfigError, match=r"cluster\.engines = 3 needs Ray"):
        divide(convert({"model": "m", "cluster": {"address": "", "engines": 3}}), ONE)


@pytest.mark.parametrize(
    ("resources", "settings", "said"),
    [
        (CPU, {}, "transformers on the CPU; the learner on the CPU"),
        (ONE, {}, "vllm on one GPU; the learner on the same GPU, and vllm sleeps during updates"),
        (EIGHT, {}, "6 vllm engines with 1 GPU each; 2 learners with 1 GPU each (Ray: local)"),
        (CPU, {"recipe": "sft", "records": {"path": "runs/a"}}, "the learner on the CPU"),
    ],
)
def test_the_division_is_said_in_a_sentence(resources: Resources, settings: dict[str, Any], said: str) -> None:
    assert describe_division(divide(convert({"model": "m", **settings}), resources).config) == said


def test_architectures_are_looked_up_in_the_installed_vllm(tmp_path: Path) -> None:
    folders = []
    for name in ("Qwen3ForCausalLM", "LlamaForCausalLM", "NeverSeenForCausalLM"):
        folders.append(tmp_path / name)
        folders[-1].mkdir()
        (folders[-1] / "config.json").write_text(f'{{"architectures": ["{name}"]}}')
    assert unknown_architectures([*folders, tmp_path]) == ("NeverSeenForCausalLM",)


@pytest.mark.parametrize(
    ("version", "expected"), [("", ""), ("0.28.0", "gpu"), ("0.28.0+cu130", "gpu"), ("0.28.0+cpu", "cpu")]
)
def test_the_version_of_vllm_says_what_it_was_built_for(version: str, expected: str) -> None:
    assert build_of(version) == expected


def test_without_settings_a_machine_without_a_gpu_trains_in_process(trainer: Trainer) -> None:
    assert trainer(application(first=letters)).finished
    assert "sampler: transformers, the CPU" in trainer.said
