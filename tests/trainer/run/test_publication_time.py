"""The line about the time of publications, before the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from cotune.records.policies import LoraSpec, policies_for
from cotune.trainer.config.load import convert
from cotune.trainer.run import publication_time
from cotune.trainer.run.publication_time import publication_notes, publication_way, seconds_per_byte
from tests.integrations import tiny_models

ON_RAY: dict[str, Any] = {"address": "local"}


@pytest.mark.parametrize(
    ("settings", "way", "place"),
    [
        ({"engine": "vllm"}, "files", " by files"),
        ({"engine": "transformers"}, "pipe", ""),
        ({"engine": "vllm", "cluster": ON_RAY}, "direct", " over gloo"),
    ],
)
def test_the_seconds_of_a_publication_of_all_weights_follow_from_their_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], way: str, place: str
) -> None:
    tiny_models.build("qwen3", tmp_path)
    monkeypatch.setattr(publication_time, "seconds_per_byte", lambda asked: {way: 1e-3}[asked])
    monkeypatch.setattr(publication_time, "SAMPLE_BYTES", 1000)  # the model is tiny
    config = convert({"model": str(tmp_path), "policies": "full", **settings})
    size = (tmp_path / "model.safetensors").stat().st_size
    (note,) = publication_notes(config, policies_for("full", ["a", "b"], LoraSpec()))
    assert note.startswith("all weights of a, b go to the sampler after each step: ")
    seconds = float(note.partition(f" GB{place}, about ")[2].split()[0])
    assert seconds == pytest.approx(size * 1e-3, rel=0.05)


def test_adapters_are_published_without_a_line() -> None:
    config = convert({"model": "m"})
    assert publication_notes(config, policies_for("lora", ["a"], LoraSpec())) == []


def test_weights_go_over_nccl_between_gpus_unless_engine_and_learner_share_one() -> None:
    config = convert({"model": "m", "engine": "vllm", "cluster": {**ON_RAY, "gpus_per_engine": 1}})
    on_gpus = msgspec.structs.replace(config, cluster=config.cluster.divided(gpus_per_learner=1.0))
    assert publication_way(on_gpus) == ("direct", " over NCCL")
    on_one = convert({"model": "m", "engine": "vllm", "cluster": {**ON_RAY, "gpus_per_engine": 0.5}})
    assert publication_way(on_one) == ("direct", " over gloo")


def test_files_are_measured_if_nothing_can_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(sample: Any) -> None:
        raise RuntimeError("gloo finds no address")

    monkeypatch.setattr(publication_time, "_time_direct_transfer", fails)
    assert 1e-11 < seconds_per_byte("direct") < 1e-5


@pytest.mark.parametrize("way", ["files", "pipe", "direct"])
def test_a_byte_takes_some_time(way: Any) -> None:
    assert 1e-11 < seconds_per_byte(way) < 1e-5
