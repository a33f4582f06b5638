"""The line that says where the parts of a run are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cotune.trainer.config.load import convert
from cotune.trainer.run.parts import where_it_runs


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"engine": "transformers", "learner": {"dtype": "float32"}},
            "sampler: transformers, the CPU, float32; learner: the CPU, float32",
        ),
        (
            {"engine": "http://host:1", "cluster": {"learners": 1}},
            "sampler: vLLM at http://host:1; learner: 1 on Ray, on the CPU, float32",
        ),
        (
            {"engine": "vllm", "cluster": {"address": "local", "engines": 3, "gpus_per_engine": 2, "learners": 2}},
            "sampler: 3 x vllm on Ray, 2 GPUs each; learner: 2 on Ray, on the CPU, float32",
        ),
    ],
)
def test_each_part_has_engine_device_and_precision(config: dict[str, Any], said: str) -> None:
    assert where_it_runs(convert({"model": "m", **config})) == said


def test_an_engine_that_sleeps_says_so() -> None:
    shared = {"gpus_per_engine": 0.5}
    config = convert({"model": "m", "engine": "vllm", "cluster": {"engines": 1, "learners": 1, **shared}})
    assert where_it_runs(config) == (
        "sampler: 1 x vllm on Ray, on a GPU that both share, asleep during updates; "
        "learner: 1 on Ray, on a GPU that both share, float32"
    )


def test_on_a_gpu_both_parts_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "H200")
    said = where_it_runs(convert({"model": "m", "engine": "transformers", "learner": {"dtype": "bfloat16"}}))
    assert said == "sampler: transformers, GPU 0 (H200), bfloat16; learner: GPU 0 (H200), bfloat16"
