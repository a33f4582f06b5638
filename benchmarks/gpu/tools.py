"""Shared by the parts: a learner and an engine on the device, clocks and comparisons."""

from __future__ import annotations

import asyncio
import gc
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from benchmarks.gpu.models import build, made_on_the_device
from cotune.algorithms.catalogue import recipe
from cotune.algorithms.samples import TrainRow
from cotune.integrations.models.transformers.sampler import TransformersSampler
from cotune.records.policies import LoraSpec, policies_for
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import Completion, Sampler, SamplingParams
from cotune.trainer.learner.local import LocalLearner
from tests.trainer.learner.forced import ForcedSettings

LOSS = msgspec.structs.replace(recipe("at_grpo").loss, tis_cap=None)
"""Rows of random tokens have no log-probabilities of a sampler to correct for."""
LORA = LoraSpec(rank=16, alpha=32.0)

Figures = dict[str, Any]


class Bench(NamedTuple):
    """The device and shapes of the parts. `tiny`: the same parts with small shapes, as the tests run them."""

    device: str
    dtype: str
    """Of matrix products, in the learner and in the engine."""
    until: float
    """When the part should end, on the clock of `time.monotonic`."""
    tiny: bool = False

    @property
    def time_is_up(self) -> bool:
        return time.monotonic() > self.until

    def size(self, usual: int, tiny: int) -> int:
        return tiny if self.tiny else usual


def open_learner(
    name: str, bench: Bench, *, kind: Any = "lora", names: Sequence[str] = ("agent",), **settings: Any
) -> LocalLearner:
    """A learner of a model with random weights, the same each time on one device in one precision."""
    chosen = ForcedSettings(**{"device": bench.device, "dtype": bench.dtype, "lr": 1e-4, **settings})
    with tempfile.TemporaryDirectory() as folder, made_on_the_device(Path(folder), name) as model:
        return LocalLearner.open(model, policies_for(kind, list(names), LORA), chosen, LOSS)


def open_engine(name: str, bench: Bench) -> Engine:
    """The engine in this process, with the base that `open_learner` has."""
    network = build(name, getattr(torch, bench.dtype), bench.device)
    return Engine(TransformersSampler.open(network, host="thread", end_token_ids=()))


class Engine:
    """An engine that is called from ordinary functions; `last` are the rows that it has drawn."""

    def __init__(self, opening: Awaitable[Sampler], lora: LoraSpec | None = LORA) -> None:
        """`lora` of the adapters that are published, None for full weights."""
        self._lora = lora
        self._loop = asyncio.new_event_loop()
        self._sampler: Any = self._loop.run_until_complete(opening)
        self._versions: dict[str, int] = {}
        self.last: list[TrainRow] = []

    def retire_all(self) -> None:
        """Take the published policies out of the engine, which stays open."""
        for policy, version in self._versions.items():
            self._loop.run_until_complete(self._sampler.retire(PolicyRef(policy, version)))
        self._versions.clear()

    def close(self) -> None:
        self._loop.run_until_complete(self._sampler.aclose())
        self._loop.close()

    def draw(
        self, prompts: Sequence[Sequence[int]], *, n: int, tokens: int, policies: Sequence[str] = ("agent",)
    ) -> list[Sequence[Completion]]:
        """`n` candidates for each prompt, all at once; the policies take turns."""
        how = SamplingParams(temperature=1.0, max_tokens=tokens, seed=0)

        async def draw_all() -> list[Sequence[Completion]]:
            calls = []
            for number, prompt in enumerate(prompts):
                policy = policies[number % len(policies)]
                ref = PolicyRef(policy, self._versions.get(policy, 0))
                calls.append(self._sampler.sample(tuple(prompt), n, how, ref))
            return list(await asyncio.gather(*calls))

        return self._loop.run_until_complete(draw_all())

    def rows(self, policy: str, prompts: Sequence[Sequence[int]], *, n: int, tokens: int) -> list[TrainRow]:
        """Its samples, as rows to train on; candidates are rewarded by turns."""
        self.last = []
        for number, candidates in enumerate(self.draw(prompts, n=n, tokens=tokens, policies=[policy])):
            for place, candidate in enumerate(candidates):
                self.last.append(
                    TrainRow(
                        id=f"call {number}, candidate {place}",
                        role=policy,
                        prompt_ids=tuple(prompts[number]),
                        response_ids=candidate.token_ids,
                        logprobs=candidate.logprobs,
                        advantage=1.0 if place % 2 else -1.0,
                        trajectory=f"call {number}",
                    )
                )
        return self.last

    def sleep(self) -> None:
        self._loop.run_until_complete(self._sampler.sleep())

    def wake(self) -> None:
        self._loop.run_until_complete(self._sampler.wake())

    def publish(self, learner: LocalLearner, policy: str = "agent") -> None:
        """Serve the policy of the learner from now on."""
        before = self._versions.get(policy, 0)
        self._versions[policy] = before + 1
        ref = PolicyRef(policy, before + 1)
        self._loop.run_until_complete(self._sampler.publish(ref, learner.weights(policy), self._lora))
        if before:
            self._loop.run_until_complete(self._sampler.retire(PolicyRef(policy, before)))


def gap(engine: Engine, learner: LocalLearner, what: str, prompts: Sequence[Sequence[int]], tokens: int) -> Figures:
    """How far log-probabilities of engine and learner are apart, in nats a token."""
    rows = engine.rows("agent", prompts, n=4, tokens=tokens)
    learner_logprobs = np.concatenate(learner.logprobs("agent", rows))
    engine_logprobs = np.concatenate([np.asarray(row.logprobs, np.float32) for row in rows])
    gaps = np.abs(learner_logprobs - engine_logprobs)
    return {
        "check": what,
        "ok": bool(gaps.mean() <= MOST_GAP),
        "mean": float(gaps.mean()),
        "p99": float(np.quantile(gaps, 0.99)),
        "max": float(gaps.max()),
        "bound": MOST_GAP,
    }


MOST_GAP = 0.02
"""Mean gap of engine and learner that is the goal on a GPU, in nats a token."""


def near(what: str, found: float, expected: float, bound: float = 0.05) -> Figures:
    """Whether two numbers differ by no more than a share of the expected one."""
    difference = abs(found - expected) / max(abs(expected), 1e-30)
    return {"check": what, "ok": bool(difference <= bound), "relative": difference, "bound": bound}


def same(what: str, found: Sequence[Any], expected: Sequence[Any], bound: float) -> Figures:
    """Whether log-probabilities differ by no more than so many nats."""
    difference = float(np.abs(np.concatenate(list(found)) - np.concatenate(list(expected))).max())
    return {"check": what, "ok": bool(difference <= bound), "max": difference, "bound": bound}


def seconds_of(bench: Bench, work: Callable[[], Any], rounds: int) -> float:
    """Seconds of one round, after one to warm up."""
    work()
    wait(bench)
    began = time.perf_counter()
    for _ in range(rounds):
        work()
    wait(bench)
    return (time.perf_counter() - began) / rounds


def wait(bench: Bench) -> None:
    """Until the device has done its work."""
    if bench.device == "cuda":
        torch.cuda.synchronize()


def free_memory(bench: Bench) -> None:
    """Give back memory that nothing refers to any more."""
    gc.collect()
    if bench.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gb(bench: Bench) -> float | None:
    """The most that tensors took since `free_memory`; None without a GPU."""
    return round(torch.cuda.max_memory_allocated() / 1e9, 2) if bench.device == "cuda" else None
