"""What the proof of a publication costs: the beginnings of prompts, however long those are."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from cotune.errors import SyncError
from cotune.integrations.models.transformers.sampler import TransformersSampler
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import Completion, fingerprint
from cotune.trainer.publish import PROBE, Probe, prove_publish
from tests.trainer.tiny_app import application, ask, letters


async def wordy(task):
    said = await ask("first", f"{'x' * 150} say {task['letter']}")
    return said.count(task["letter"]) / 4


def test_a_probe_samples_two_tokens_after_thirty_two(trainer, monkeypatch):
    asked, sample = [], TransformersSampler.sample

    async def listening(sampler, prompt, n, params, policy):
        if params == PROBE:
            asked.append((str(policy), len(prompt), n))
        return await sample(sampler, prompt, n, params, policy)

    monkeypatch.setattr(TransformersSampler, "sample", listening)
    trainer(application(wordy, first=letters), steps=1)
    assert asked == [("first@1", 32, 16)]
    (line,) = trainer.metrics()
    assert line["roles"]["first"]["prompt_tokens_mean"] > 150
    assert 0 < line["policies"]["first"]["probe_gap_mean"] < 1e-4


class FarOff:
    """A sampler that is off the trainer's log-probabilities by `gaps`, by how many tokens it is asked for."""

    def __init__(self, gaps: dict[int, float]) -> None:
        self.gaps, self.asked = gaps, []

    async def publish(self, policy, weights, lora=None):
        return fingerprint(weights)

    async def sample(self, prompt, n, params, policy):
        self.asked.append(params.max_tokens)
        tokens = (1,) * params.max_tokens
        return [Completion(tokens, (self.gaps[params.max_tokens],) * params.max_tokens, "length")] * n


@pytest.mark.parametrize(("longer", "fails"), [(0.01, False), (0.2, True)])
def test_a_longer_probe_decides_where_the_first_is_above_the_bound(longer, fails):
    sampler = FarOff({2: 0.2, 16: longer})
    probe = Probe([(1, 2, 3)], lambda rows: [np.zeros(len(row.response_ids)) for row in rows], bound=0.05)
    weights = {"w": np.ones(3, np.float32)}
    work = prove_publish(sampler, PolicyRef("a", 1), weights, probe=probe)
    if fails:
        with pytest.raises(SyncError, match=r"differ by 0\.2 nats"):
            asyncio.run(work)
    else:
        assert asyncio.run(work).probe_gap_mean == pytest.approx(0.01)
    assert sampler.asked == [2, 16]


def test_a_gap_above_the_bound_names_what_helps_on_the_machine():
    prompts, helps = [(1, 2, 3)], "Compute logits in float32."
    probe = Probe(prompts, lambda rows: [np.zeros(len(row.response_ids)) for row in rows], 0.05, helps)
    work = prove_publish(FarOff({2: 0.2, 16: 0.2}), PolicyRef("a", 1), {"w": np.ones(3, np.float32)}, probe=probe)
    with pytest.raises(SyncError, match=helps):
        asyncio.run(work)
