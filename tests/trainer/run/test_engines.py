"""Which engine samples for a run: its own, vLLM's, or one of the user's, on Ray and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cotune.errors import ConfigError
from cotune.integrations.models.engines import ENGINES
from cotune.integrations.models.transformers.sampler import TransformersSampler
from cotune.records.policies import policies_for
from cotune.sampling.protocol import Sampler
from cotune.trainer.config.train import convert
from cotune.trainer.run.engines import engine_config, owners
from cotune.user_objects import load_object
from tests.trainer.conftest import Trainer
from tests.trainer.tiny_app import application, letters


async def opened(model: str, mark: str) -> Sampler:
    """An engine of one's own."""
    Path(mark).touch()
    return await TransformersSampler.open(model, threads=1)


def test_a_run_without_ray_samples_from_an_engine_of_ones_own(trainer: Trainer) -> None:
    mark = trainer.folder / "opened"
    engine = {"engine": "tests.trainer.run.test_engines:opened", "engine_args": {"mark": str(mark)}}
    summary = trainer(application(first=letters), cluster={"address": "none", **engine})
    assert summary.finished and mark.exists()
    mark.unlink()
    assert trainer.resume(application(first=letters), steps=3).finished and mark.exists()


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_is_where_its_row_says(engine: str) -> None:
    load_object("engine", ENGINES[engine].open, "")


@pytest.mark.parametrize(
    ("address", "engine", "expected"),
    [("none", "", "transformers"), ("local", "", "vllm"), ("none", "vllm", "vllm"), ("auto", "a:b", "a:b")],
)
def test_the_engine_of_a_run(address: str, engine: str, expected: str) -> None:
    config = convert({"model": "m", "cluster": {"address": address, "engine": engine}})
    found = engine_config(config, "m", "lora")
    assert (found.engine, found.alone) == (expected, address != "none")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cluster": {"address": "none", "learners": 2}}, r"cluster.learners = 2 needs Ray\. Set cluster.address"),
        ({"cluster": {"address": "none", "env": {"KEY": "1"}}}, "cluster.env = .* needs Ray"),
        ({"cluster": {"engine": "sglang"}}, "cluster.engine = 'sglang' is not one of transformers, vllm, vllm-url"),
        ({"cluster": {"engine_url": "http://h:1"}}, 'engine_url = .* needs cluster.engine = "vllm-url"'),
    ],
)
def test_an_engine_that_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        convert({"model": "m", **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "vllm-url", "engine_url": "http://h:1"}, "policies = 'full' cannot be sampled by vllm-url"),
        ({"engine": "vllm"}, "mode = 'async' cannot be used if vllm serves full weights"),
    ],
)
def test_weights_that_an_engine_cannot_serve_are_refused(settings: dict[str, Any], message: str) -> None:
    config = convert({"model": "m", "policies": "full", "mode": "async", "cluster": settings})
    with pytest.raises(ConfigError, match=message):
        engine_config(config, "m", "full")


def test_policies_with_full_weights_need_an_engine_each() -> None:
    """Which one that is opened in this process cannot be."""
    config = convert({"model": "m", "policies": "full", "cluster": {"address": "none", "engine": "vllm"}})
    with pytest.raises(ConfigError, match="first, second need engines of their own"):
        owners(config, policies_for("full", ["first", "second"], config.lora))
