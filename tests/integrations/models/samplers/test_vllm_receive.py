"""An engine whose two workers receive full weights: if one of them fails, all of them load files."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cotune.errors import LearnerLost, SamplerError
from cotune.integrations.cluster.weight_transfer import LearnerWeights, Offer, Received, Ticket
from cotune.integrations.models.engine_sampler import BY_FILES
from cotune.integrations.models.vllm import engine
from cotune.integrations.models.vllm.adapters import read_weights
from cotune.integrations.models.vllm.arguments import EngineSize
from cotune.integrations.models.vllm.engine import VllmSampler
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import Weights, fingerprint

WEIGHTS: Weights = {"a": np.arange(3, dtype=np.float32)}


def answer(fingerprint: str = "", transfer_error: str = "", load_error: str = "") -> Received:
    return {"fingerprint": fingerprint, "transfer_error": transfer_error, "load_error": load_error}


SENT = answer(fingerprint(WEIGHTS))
CLOSED = answer(transfer_error="Connection closed")


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler without an import of vLLM, which takes ten seconds."""
    base = SimpleNamespace(WeightTransferUpdateRequest=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.base", base)  # type: ignore[arg-type]
    monkeypatch.setattr(engine, "on_gpu", lambda: False)


class TwoWorkers:
    """Stands for vLLM's engine. Each worker has loaded the weights with this fingerprint last."""

    errored = False
    vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=2))

    def __init__(self, answers: list[Received]) -> None:
        self.answers = answers
        self.calls: list[str] = []
        self.loaded = ""

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        self.calls.append(method)
        if method == "cotune_weights":
            return [self.loaded] * 2
        (ticket,) = args
        assert ticket["workers"] == 2
        return self.answers

    async def update_weights(self, request: Any) -> None:
        self.loaded = fingerprint(read_weights(Path(request.update_info["path"])))

    def __getattr__(self, name: str) -> Any:
        async def call(*_: Any, **__: Any) -> None:
            self.calls.append(name)

        return call


class Stored(LearnerWeights):
    """Weights of a learner that can be read. It answers a request to send them with an error, or at once."""

    def __init__(self, error: Exception | None = None) -> None:
        def send(stored: Any, ticket: Ticket) -> Any:
            answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            if error is None:
                answer.set_result(None)
            else:
                answer.set_exception(error)
            return answer

        super().__init__(Offer.of(WEIGHTS, "127.0.0.1", 1, "cpu"), None, send)
        self._arrays = WEIGHTS


def opened(llm: TwoWorkers) -> VllmSampler:
    skeleton: Any = SimpleNamespace(check=lambda *_: None)
    sampler = VllmSampler(skeleton, EngineSize(full=True))
    sampler._llm = llm
    return sampler


def test_weights_that_both_workers_received_are_not_written() -> None:
    async def scenario() -> None:
        llm = TwoWorkers([SENT, SENT])
        sampler = opened(llm)
        assert await sampler.publish(PolicyRef("p", 1), Stored()) == SENT["fingerprint"]
        assert "cotune_weights" not in llm.calls
        assert (await sampler.info()).counters == {}

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("answers", "error", "cause"),
    [
        ([SENT, answer(transfer_error="RuntimeError: out of memory")], None, "RuntimeError: out of memory"),
        ([CLOSED] * 2, ValueError("killed"), "Connection closed (the learner: ValueError: killed)"),
        ([SENT, answer("f" * 64)], None, "other values arrived than were sent"),
        ([answer("f" * 64)] * 2, None, "other values arrived than were sent"),
    ],
)
def test_a_failure_is_one_line_and_all_workers_load_these_and_later_weights_from_files(
    answers: list[Received], error: Exception | None, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        llm = TwoWorkers(answers)
        sampler = opened(llm)
        for version in (1, 2):
            assert await sampler.publish(PolicyRef("p", version), Stored(error)) == SENT["fingerprint"]
            assert (await sampler.info()).counters == {BY_FILES: version}
        assert llm.calls.count("cotune_receive") == 1
        assert llm.calls.count("start_weight_update") == llm.calls.count("finish_weight_update") == 2

    asyncio.run(scenario())
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("cotune")]
    assert lines == [f"p@1 and later versions of this learner are published by files, which takes longer: {cause}."]


def test_weights_that_are_neither_sent_nor_read_break_the_engine_and_name_the_learner() -> None:
    class Gone(Stored):
        def __getitem__(self, name: str) -> Any:
            raise LearnerLost("The machine is lost.", "Open a new learner.")

    async def scenario() -> None:
        sampler = opened(TwoWorkers([CLOSED] * 2))
        with pytest.raises(LearnerLost, match="The machine is lost"):
            await sampler.publish(PolicyRef("p", 1), Gone())
        with pytest.raises(SamplerError, match="the engine's weights are lost: The machine is lost"):
            await sampler.info()

    asyncio.run(scenario())


def test_an_engine_that_loads_weights_answers_a_health_check() -> None:
    async def scenario() -> None:
        llm = TwoWorkers([SENT, SENT])
        sampler = opened(llm)
        async with sampler._versions.lock:
            await sampler.info()
        assert "is_paused" not in llm.calls
        await sampler.info()
        assert "is_paused" in llm.calls

    asyncio.run(scenario())


def test_an_engine_that_ends_while_it_loads_weights_fails_a_health_check() -> None:
    async def scenario() -> None:
        llm = TwoWorkers([SENT, SENT])
        sampler = opened(llm)
        async with sampler._versions.lock:
            llm.errored = True
            with pytest.raises(SamplerError, match="vLLM's engine process has ended"):
                await sampler.info()

    asyncio.run(scenario())


def test_a_model_that_does_not_take_the_tensors_breaks_the_engine() -> None:
    async def scenario() -> None:
        llm = TwoWorkers([CLOSED, answer(load_error="RuntimeError: no weights for ['a']"), CLOSED])
        sampler = opened(llm)
        with pytest.raises(SamplerError, match=r"weights are lost: .*did not load them: RuntimeError: no weights for"):
            await sampler.publish(PolicyRef("p", 1), Stored())
        assert "start_weight_update" not in llm.calls
        with pytest.raises(SamplerError, match="weights are lost"):
            await sampler.info()

    asyncio.run(scenario())
