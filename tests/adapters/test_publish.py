"""A version counts as published only with proof: arrived, moved, and sampled from."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from cotune.algorithms.samples import TrainRow
from cotune.errors import SyncError
from cotune.records.policies import LoraSpec
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import Completion, SamplerInfo, SamplingParams, Weights, fingerprint, weights_norm
from cotune.trainer.publish import Probe, Proof, probe_prompts, prove_publish

OLD, NEW = PolicyRef("writer", 1), PolicyRef("writer", 2)


class Scripted:
    """Samples the tokens 1, 2 with fixed log-probabilities, and keeps what was published and retired."""

    def __init__(self, *, lost: bool = False) -> None:
        self.lost = lost
        self.log: list[str] = []

    async def sample(
        self, prompt_token_ids: Sequence[int], n: int, params: SamplingParams, policy: PolicyRef
    ) -> list[Completion]:
        self.log.append(f"sample {policy}")
        return [Completion((1, 2), (-0.5, -1.0), "length")] * n

    async def publish(self, policy: PolicyRef, weights: Weights, lora: LoraSpec | None = None) -> str:
        self.log.append(f"publish {policy}")
        return fingerprint({} if self.lost else weights)

    async def retire(self, policy: PolicyRef) -> None:
        self.log.append(f"retire {policy}")

    async def info(self) -> SamplerInfo:
        return SamplerInfo(name="scripted", max_model_len=64)

    async def aclose(self) -> None:
        pass


def weights(scale: float) -> Weights:
    return {"a": np.full((2, 2), scale, np.float32), "b": np.zeros(3, np.float32)}


def trainer(*values: float) -> Any:
    def logprobs(rows: Sequence[TrainRow]) -> list[np.ndarray]:
        return [np.array(values, np.float32) for _ in rows]

    return logprobs


def prove(sampler: Scripted, current: Weights, **options: Any) -> Proof:
    return asyncio.run(prove_publish(sampler, NEW, current, None, **options))


def previous(scale: float) -> Proof:
    return Proof(policy=OLD, fingerprint=fingerprint(weights(scale)), norm=weights_norm(weights(scale)))


def test_norm_is_over_all_tensors() -> None:
    assert weights_norm({"a": np.array([3.0], np.float32), "b": np.array([[4.0]], np.float32)}) == 5.0


def test_proof_has_the_figures_and_older_versions_are_retired_last() -> None:
    sampler = Scripted()
    options = {"previous": previous(1.0), "probe": Probe([(7, 8), (9,)], trainer(-0.501, -0.998))}
    proof = prove(sampler, weights(1.5), retire=[OLD], **options)
    assert proof.policy == NEW
    assert proof.fingerprint == fingerprint(weights(1.5))
    assert proof.norm == pytest.approx(3.0)
    assert proof.norm_moved == pytest.approx(1.0)
    assert proof.probe_gap_mean == pytest.approx(0.0015, abs=1e-6)
    assert proof.probe_gap_max == pytest.approx(0.002, abs=1e-6)
    assert proof.probe_tokens == 32
    assert sampler.log == ["publish writer@2", "sample writer@2", "sample writer@2", "retire writer@1"]


def test_a_probe_is_of_what_prompts_begin_with() -> None:
    shared = tuple(range(70))
    assert probe_prompts([(*shared, 1), (*shared, 2)]) == [shared[:32]]
    assert probe_prompts([(1, 2), (1, 2), (3,)]) == [(1, 2), (3,)]
    assert probe_prompts([(i,) for i in range(9)]) == [(0,), (1,), (2,), (3,)]


def test_weights_that_arrive_altered() -> None:
    with pytest.raises(SyncError, match=r"writer@2 arrived with fingerprint \w{64}; \w{64} was sent"):
        prove(Scripted(lost=True), weights(1.0))


def test_an_update_that_changed_nothing() -> None:
    sampler = Scripted()
    with pytest.raises(SyncError, match=r"writer@2 are equal to writer@1 .*norm 2\): the update changed nothing"):
        prove(sampler, weights(1.0), previous=previous(1.0))
    assert sampler.log == []


def test_a_sampler_that_samples_from_other_weights() -> None:
    sampler = Scripted()
    with pytest.raises(
        SyncError, match=r"differ by 0.2 nats a token \(at most 0.3\) over 32 tokens; the bound is 0.01"
    ):
        prove(sampler, weights(1.0), probe=Probe([(7,)], trainer(-0.6, -1.3)), retire=[OLD])
    assert "retire writer@1" not in sampler.log


def test_a_gap_that_is_no_number() -> None:
    with pytest.raises(SyncError, match="nan"):
        prove(Scripted(), weights(1.0), probe=Probe([(7,)], trainer(float("nan"), -1.0)))


def test_weights_that_are_not_finite() -> None:
    with pytest.raises(SyncError, match="not finite"):
        prove(Scripted(), weights(float("inf")))
