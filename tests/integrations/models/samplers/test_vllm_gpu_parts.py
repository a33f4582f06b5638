"""What `make gpu-vllm` measures on a GPU runs here with small shapes, on engines that other tests have opened."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import models
from benchmarks.gpu.tools import LOSS, Bench, Engine
from benchmarks.gpu.vllm_parts import (
    full_weights,
    gaps,
    loads,
    model_folder,
    publications,
    run_sections,
    sleeping,
)
from cotune.integrations.models.folder.meta_model import ModelSkeleton
from cotune.records.policies import LoraSpec, policies_for
from cotune.sampling.protocol import Sampler
from cotune.trainer.learner.local import LocalLearner
from tests.trainer.learner.forced import ForcedSettings

LORA = LoraSpec(rank=8, alpha=16.0)


def figures_of(
    monkeypatch: pytest.MonkeyPatch, model: Path, sampler: Sampler, kind: Any, sections: Any
) -> list[dict[str, Any]]:
    vocabulary = AutoConfig.from_pretrained(model).vocab_size
    monkeypatch.setitem(models.SHAPES, "tiny", models.SHAPES["tiny"]._replace(vocabulary=vocabulary))
    bench = Bench(device="cpu", dtype="float32", until=time.monotonic() + 600, tiny=True)
    settings = ForcedSettings(device="cpu", dtype="float32", lr=1e-4)
    learner = LocalLearner.open(str(model), policies_for(kind, ["agent"], LORA), settings, LOSS)

    async def opened() -> Sampler:
        return sampler

    engine = Engine(opened(), LORA if kind == "lora" else None)
    lines = [{"part": "", **figures} for figures in run_sections(bench, engine, learner, "tiny", sections)]
    engine.retire_all()  # other tests use the engine too
    found = gpu.summary(lines)
    assert (found["checks_failed"], found["parts_failed"], found["left_out"]) == ([], [], []), lines
    return lines


@pytest.mark.slow
def test_sections_of_adapters_run_on_the_cpu(
    vllm_in_ray: Sampler, contract_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections = (gaps, publications, loads, sleeping)
    lines = figures_of(monkeypatch, contract_model, vllm_in_ray, "lora", sections)
    assert len([line for line in lines if "check" in line]) == 3
    assert [line["calls"] for line in lines if "calls" in line] == [2, 4]
    assert [line["same_answers_after_waking"] for line in lines if "answers" in line] == [8]


@pytest.mark.slow
def test_sections_of_full_weights_run_on_the_cpu(
    vllm_full: Sampler, contract_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = figures_of(monkeypatch, contract_model, vllm_full, "full", (full_weights,))
    assert sorted(lines[0]) == ["full_publication", "part", "seconds"]


def test_a_section_that_fails_is_a_line_and_the_next_one_runs() -> None:
    def broken(*_: Any) -> Any:
        yield {"figure": 1}
        raise ZeroDivisionError("a fault")

    def sound(*_: Any) -> Any:
        yield {"figure": 2}

    bench = Bench(device="cpu", dtype="float32", until=time.monotonic() + 600, tiny=True)
    nothing: Any = None
    first, second, third = run_sections(bench, nothing, nothing, "tiny", (broken, sound))
    assert (first, third) == ({"figure": 1}, {"figure": 2})
    assert (second["section"], second["failed"]) == ("broken", "ZeroDivisionError: a fault")


def test_the_folder_for_vllm_has_a_token_for_each_logit() -> None:
    bench = Bench(device="cpu", dtype="float32", until=0.0, tiny=True)
    with model_folder("tiny", bench) as folder:
        skeleton = ModelSkeleton(folder)
        assert skeleton.token_ids == skeleton.logits == models.SHAPES["tiny"].vocabulary
