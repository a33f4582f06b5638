"""The line about the time of publications, before the first step."""

from __future__ import annotations

from pathlib import Path

import pytest

from cotune.records.policies import LoraSpec, policies_for
from cotune.trainer.config.load import convert
from cotune.trainer.run import publication_time
from cotune.trainer.run.publication_time import publication_notes, seconds_per_byte
from tests.integrations import tiny_models


@pytest.mark.parametrize(("engine", "place"), [("vllm", " by files"), ("transformers", "")])
def test_the_seconds_of_a_publication_of_all_weights_follow_from_their_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, place: str
) -> None:
    tiny_models.build("qwen3", tmp_path)
    monkeypatch.setattr(publication_time, "seconds_per_byte", lambda by_files: 1e-3)
    monkeypatch.setattr(publication_time, "SAMPLE_BYTES", 1000)  # the model is tiny
    config = convert({"model": str(tmp_path), "policies": "full", "engine": engine})
    size = (tmp_path / "model.safetensors").stat().st_size
    (note,) = publication_notes(config, policies_for("full", ["a", "b"], LoraSpec()))
    assert note.startswith("all weights of a, b go to the sampler after each step: ")
    seconds = float(note.partition(f" GB{place}, about ")[2].split()[0])
    assert seconds == pytest.approx(size * 1e-3, rel=0.05)


def test_adapters_are_published_without_a_line() -> None:
    config = convert({"model": "m"})
    assert publication_notes(config, policies_for("lora", ["a"], LoraSpec())) == []


def test_a_byte_takes_some_time() -> None:
    assert 1e-11 < seconds_per_byte(by_files=True) < 1e-5
