"""Which engine samples for a run: its own, vLLM's, or one of the user's, on Ray and without."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from cotune.config.cluster import DividedCluster
from cotune.config.train import TrainConfig
from cotune.errors import ConfigError
from cotune.integrations.models import bfloat16
from cotune.integrations.models.engines import ENGINES
from cotune.integrations.models.transformers.sampler import TransformersSampler
from cotune.records.policies import policies_for
from cotune.sampling.protocol import Sampler
from cotune.trainer.config.load import convert
from cotune.trainer.opening.cluster import check_gpus
from cotune.trainer.run.engines import EngineSet, engine_config, engine_sets, first_sets, server_urls
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
    summary = trainer(application(first=letters), **engine)
    assert summary.finished and mark.exists()
    mark.unlink()
    assert trainer.resume(application(first=letters), steps=3).finished and mark.exists()


def test_more_gpus_than_ray_has_are_refused_before_an_engine_waits_for_them() -> None:
    settings = DividedCluster(address="local", engines=2, gpus_per_engine=2, learners=1, gpus_per_learner=1)
    check_gpus(settings, sets=1, present=5)
    with pytest.raises(ConfigError, match=r"cluster\.engines = 2 takes 8 GPUs, and the learners take 1: Ray has 5"):
        check_gpus(settings, sets=2, present=5)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_is_where_its_row_says(engine: str) -> None:
    load_object("engine", ENGINES[engine].open, "")


@pytest.mark.parametrize(
    ("address", "engine", "alone"),
    [("none", "transformers", False), ("local", "vllm", True), ("none", "vllm", False), ("auto", "a:b", True)],
)
def test_the_engine_of_a_run(address: str, engine: str, alone: bool) -> None:
    config = convert({"model": "m", "engine": engine, "cluster": {"address": address}})
    found = engine_config(config, EngineSet("m"))
    assert (found.engine, found.alone, found.gpus) == (engine, alone, 0)
    assert found.sleeps == (engine == "vllm" and not alone)


def test_an_engine_that_shares_a_gpu_sleeps() -> None:
    shared = {"gpus_per_engine": 0.5}
    for engine, sleeps in (("vllm", True), ("transformers", False)):
        found = engine_config(convert({"model": "m", "engine": engine, "cluster": shared}), EngineSet("m"))
        assert (found.gpus, found.sleeps) == (1, sleeps)


@pytest.mark.parametrize(
    ("settings", "sequences"),
    [
        ({}, 256),
        ({"plan": {"k": 8}, "concurrency": 10}, 80),
        ({"plan": {"kind": "independent"}}, 64),
        ({"cluster": {"address": "local", "engines": 3}}, 86),
    ],
)
def test_an_engine_is_told_how_many_candidates_it_is_asked_for_at_once(
    settings: dict[str, Any], sequences: int
) -> None:
    assert engine_config(convert({"model": "m", **settings}), EngineSet("m")).sequences == sequences


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cluster": {"address": "none", "learners": 2}}, r"cluster.learners = 2 needs Ray\. Set cluster.address"),
        ({"cluster": {"address": "none", "env": {"KEY": "1"}}}, "cluster.env = .* needs Ray"),
        ({"engine": "sglang"}, "engine = 'sglang' is not one of auto, transformers, vllm, an address"),
        ({"engine_url": "http://h:1"}, "engine_url = .* Write the address as engine"),
        ({"engine": "vllm-url"}, "engine = 'vllm-url' has no address"),
    ],
)
def test_an_engine_that_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        convert({"model": "m", **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "http://h:1"}, "policies = 'full' cannot be sampled by http://h:1"),
        ({"engine": "vllm"}, "mode = 'async' cannot be used if vllm serves full weights"),
    ],
)
def test_weights_that_an_engine_cannot_serve_are_refused(settings: dict[str, Any], message: str) -> None:
    config = convert({"model": "m", "policies": "full", "mode": "async", **settings})
    with pytest.raises(ConfigError, match=message):
        engine_config(config, EngineSet("m", "full"))


def test_policies_with_full_weights_need_an_engine_each() -> None:
    """Which one that is opened in this process cannot be."""
    config = convert({"model": "m", "policies": "full", "engine": "vllm"})
    with pytest.raises(ConfigError, match="first, second need separate engines"):
        engine_sets(config, policies_for("full", ["first", "second"], config.lora.spec))


TEAM: list[dict[str, Any]] = [
    {"name": "one", "roles": ["a"], "lora": {"rank": 4}},
    {"name": "two", "roles": ["b"], "model": "n", "lora": {"rank": 8}},
    {"name": "three", "roles": ["c"], "model": "n", "kind": "frozen"},
    {"name": "four", "roles": ["d"], "model": "n", "kind": "full"},
    {"name": "five", "roles": ["e"], "kind": "provider"},
]


def team(**settings: Any) -> TrainConfig:
    return convert({"model": "m", "policy": TEAM, **settings})


def test_each_base_has_engines_and_in_vllm_each_policy_of_full_weights() -> None:
    config = team(engine="transformers")
    assert first_sets(config) == [EngineSet("m", "lora", ("one",)), EngineSet("n", "lora", ("two", "three", "four"))]
    config = team(engine="vllm", cluster={"address": "local"})
    assert first_sets(config) == [
        EngineSet("m", "lora", ("one",)),
        EngineSet("n", "full", ("four",)),
        EngineSet("n", "lora", ("two", "three")),
    ]
    assert [str(one) for one in first_sets(config)] == ["m", "four", "n"]
    ranks = [
        (engine_config(config, one).max_lora_rank, engine_config(config, one).policies) for one in first_sets(config)
    ]
    assert ranks == [(4, 1), (8, 1), (8, 1)]


def test_one_engine_beside_a_learner_has_one_base() -> None:
    shared = {"gpus_per_engine": 0.5}
    settings: dict[str, Any] = {"model": "m", "policy": TEAM[:2], "engine": "vllm", "cluster": shared}
    with pytest.raises(ConfigError, match=r"engine = 'vllm' cannot be used here: m, n need separate engines"):
        first_sets(convert(settings))


def test_each_base_needs_a_server() -> None:
    fault = "'http://h:1' names 1 server for 2 base models: m, n. Name one server for each base model."
    with pytest.raises(ConfigError, match=re.escape(fault)):
        config = convert({"model": "m", "policy": TEAM[:2], "engine": "http://h:1"})
        asyncio.run(server_urls(config))
    with pytest.raises(ConfigError, match="is not the address of a vLLM server"):
        team(engine="http://h:1,h:2")


@pytest.mark.parametrize(
    ("asked", "there", "expected"),
    [("float32", True, None), ("bfloat16", True, "bfloat16"), ("bfloat16", False, None)],
)
def test_the_in_process_engine_computes_as_the_learner(
    monkeypatch: pytest.MonkeyPatch, asked: str, there: bool, expected: str | None
) -> None:
    monkeypatch.setattr(bfloat16, "has_bfloat16", lambda: there)
    assert engine_config(convert({"model": "m", "learner": {"dtype": asked}}), EngineSet("m")).dtype == expected
