"""Full weights in a real vLLM: sent by the learner's process, and by files if that fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import Completion, Sampler, Weights, fingerprint
from tests.integrations.conftest import vllm_actor
from tests.integrations.models.samplers.test_contract import PROMPTS, Reference, parameters, params, run, tuned
from tests.integrations.models.samplers.weight_sender import offered, senders

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def versions(contract_model: Path) -> list[Weights]:
    model = Reference(contract_model, None, {}, {})
    return [parameters(tuned(model, version)) for version in (1, 2)]


@pytest.fixture(scope="module")
def two_workers(ray_runtime: str, contract_model: Path) -> Iterator[Sampler]:
    """An engine for full weights whose model is divided between two processes."""
    arguments = {"max_num_seqs": 4, "tensor_parallel_size": 2}
    yield from vllm_actor(contract_model, weights="full", engine_args=arguments)


class Engine:
    """An engine for full weights, with the facts that show which weights it holds."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._version = 0

    def publish(self, weights: Weights) -> tuple[int, list[Completion]]:
        """Publish the next version. Returns a digest of the model in the workers, and answers of temperature 0."""
        self._version += 1
        ref = PolicyRef("direct", self._version)
        assert run(self._sampler.publish(ref, weights)) == fingerprint(weights)
        answers = [run(self._sampler.sample(prompt, 1, params(temperature=0.0), ref))[0] for prompt in PROMPTS]
        run(self._sampler.retire(ref))
        return self._counters()["model"], answers

    @property
    def by_files(self) -> int:
        return self._counters().get("published_by_files", 0)

    def _counters(self) -> Any:
        return run(self._sampler.info()).counters


def test_the_learner_sends_the_same_bits_as_files_have_and_every_failure_ends_in_files(
    vllm_full: Sampler, versions: list[Weights]
) -> None:
    engine = Engine(vllm_full)
    expected = [engine.publish(weights) for weights in versions]
    assert expected[0] != expected[1]
    with senders() as group:
        assert [engine.publish(offered(group, weights)) for weights in versions] == expected
        assert engine.by_files == 0
        for count, (version, behaviour) in enumerate(((0, "alters"), (1, "breaks"), (0, "dies")), 1):
            assert engine.publish(offered(group, versions[version], behaviour)) == expected[version]
            assert engine.by_files == count


@pytest.mark.long  # the test above has one worker, and `test_vllm_receive.py` two of which one fails
def test_two_workers_receive_the_same_weights_and_use_files_together(
    two_workers: Sampler, versions: list[Weights]
) -> None:
    engine = Engine(two_workers)
    expected = [engine.publish(weights) for weights in versions]
    with senders() as group:
        assert [engine.publish(offered(group, weights)) for weights in versions] == expected
        assert engine.by_files == 0
        assert engine.publish(offered(group, versions[0], "breaks")) == expected[0]
        assert engine.by_files == 1
