"""Full weights in a real vLLM: directly from the process that learns, and by files if that fails."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from cotune.integrations.cluster import weight_transfer
from cotune.integrations.cluster.weight_transfer import TransferGroup, WeightServer, serving_here
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import Completion, Sampler, Weights, fingerprint
from tests.integrations.models.samplers.test_contract import PROMPTS, Reference, parameters, params, run, tuned

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
BUCKET = 100_000


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[WeightServer]:
    """What rank 0 of a learner has, with several buckets for the tiny model."""
    monkeypatch.setattr(weight_transfer, "BUCKET_BYTES", BUCKET)
    with serving_here() as server:
        yield server


@pytest.fixture(scope="module")
def versions(contract_model: Path) -> list[Weights]:
    model = Reference(contract_model, None, {}, {})
    return [parameters(tuned(model, version)) for version in (1, 2)]


class Engine:
    """The engine for full weights, with the facts that show which weights it holds."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._version = 0

    def publish(self, weights: Weights) -> tuple[int, list[Completion]]:
        """Publish a next version; returns a digest of the model and answers of temperature 0."""
        self._version += 1
        ref = PolicyRef("direct", self._version)
        assert run(self._sampler.publish(ref, weights)) == fingerprint(weights)
        answers = [run(self._sampler.sample(prompt, 1, params(temperature=0.0), ref))[0] for prompt in PROMPTS]
        run(self._sampler.retire(ref))
        return self.counters()["model"], answers

    def counters(self) -> Mapping[str, int]:
        return run(self._sampler.info()).counters


def test_weights_from_the_learner_are_those_of_files_bit_by_bit_until_they_do_not_come(
    vllm_full: Sampler, server: WeightServer, versions: list[Weights], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(vllm_full)
    by_files = [engine.publish(weights) for weights in versions]
    assert by_files[0] != by_files[1]
    sent: list[dict[str, Any]] = []
    whole = weight_transfer.send_buckets

    def counted(group: TransferGroup, weights: Weights, device: torch.device) -> None:
        sent.append({"bytes": sum(array.nbytes for array in weights.values()), "device": device.type})
        whole(group, weights, device)

    monkeypatch.setattr(weight_transfer, "send_buckets", counted)
    directly = [engine.publish(server.offer("direct", weights)) for weights in versions]
    assert directly == by_files
    assert len(sent) == 2 and sent[0]["bytes"] > 2 * BUCKET
    assert "published_by_files" not in engine.counters()

    # The learner's connection breaks after one bucket. The engine fetches all weights again, and loads files.
    def breaks(group: TransferGroup, weights: Weights, device: torch.device) -> None:
        monkeypatch.setattr(weight_transfer, "send_buckets", counted)
        first = dict(list(weights.items())[:1])
        whole(group, first, device)
        raise ConnectionError("the network is gone")

    monkeypatch.setattr(weight_transfer, "send_buckets", breaks)
    sent.clear()
    assert engine.publish(server.offer("direct", versions[0])) == by_files[0]
    assert engine.counters()["published_by_files"] == 1
    assert len(sent) == 1
    assert engine.publish(server.offer("direct", versions[1])) == by_files[1]
    assert engine.counters()["published_by_files"] == 2
