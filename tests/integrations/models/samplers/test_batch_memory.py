"""Keys and values of the in-process engine: what is admitted, what the buffers hold, and what is given back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from cotune.integrations.models.child.wire import Answer, Command
from cotune.integrations.models.transformers import engine
from cotune.integrations.models.transformers.batch import BASE, Batch
from cotune.integrations.models.transformers.cache import buffer_tokens, columns_for
from cotune.integrations.models.transformers.engine import DecodingEngine
from cotune.integrations.models.transformers.rows import Job
from cotune.integrations.models.transformers.wire import ModelSource
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import SamplingParams


@pytest.fixture(scope="module")
def narrow() -> Any:
    """A model of one layer, in which a step takes half a millisecond."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = Qwen3Config(**sizes, num_key_value_heads=1, head_dim=16, vocab_size=32, max_window_layers=1)
    torch.manual_seed(0)
    return Qwen3ForCausalLM._from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()


def open_engine(model: Any, emit: Any = lambda answers: None, **limits: Any) -> DecodingEngine:
    source = ModelSource(model, None, None, 1, limits.get("rows", 1024), limits.get("tokens", 1 << 22), None, (), 0)
    return DecodingEngine(model, None, (), source, emit)


def mixed_jobs(rng: random.Random) -> Iterator[Job]:
    for id in range(16):
        prompt = rng.choice([20, 40, 80, 160]) + rng.randint(0, 20)
        how = SamplingParams(max_tokens=4000)
        yield Job(
            id, tuple(rng.choices(range(32), k=prompt)), rng.choice([1, 4, 8]), how, BASE, rng.choice([10, 30, 60]), id
        )


@pytest.mark.parametrize("seed", range(3))
def test_buffers_never_hold_more_than_was_admitted(narrow: Any, seed: int) -> None:
    rng = random.Random(seed)
    room = rng.choice([3000, 6000])  # the largest request takes 8 rows of 256 columns
    served = open_engine(narrow, tokens=room)
    batch = served._base
    served._waiting[batch].extend(mixed_jobs(rng))
    token_bytes = 2 * 16 * 4
    admitted_together = 0
    while served._waiting[batch] or batch.rows:
        served._admit(batch)
        admitted_together = max(admitted_together, batch.alive)
        if batch.rows:
            batch.step()
        assert batch.cache.nbytes <= room * token_bytes
    assert admitted_together > 8


def test_a_request_that_is_larger_than_the_room_runs_alone(narrow: Any) -> None:
    served = open_engine(narrow, tokens=100)
    batch = served._base
    for id in range(2):
        served._waiting[batch].append(Job(id, (1, 2, 3), 4, SamplingParams(max_tokens=70), BASE, 70, id))
    served._admit(batch)
    assert batch.rows == 4
    while batch.rows:
        assert batch.cache.nbytes <= buffer_tokens(4, 73) * 2 * 16 * 4
        batch.step()


@pytest.mark.parametrize(("tokens", "columns"), [(1, 64), (32, 64), (33, 128), (96, 128)])
def test_columns_are_allocated_in_steps_of_64_of_which_32_are_free(tokens: int, columns: int) -> None:
    assert columns_for(tokens) == columns


def test_an_idle_engine_gives_its_buffers_back(narrow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "IDLE_SECONDS", 0.001)
    held: list[int] = []

    def emit(answers: list[Answer]) -> None:
        held.append(served._base.cache.nbytes)
        if len(held) == 1:
            served.submit(Command("sample", 2, ((1, 2, 3), 2, SamplingParams(max_tokens=5, seed=1), PolicyRef("any"))))

    served = open_engine(narrow, emit)
    released = served._base.release

    def close_after_release() -> None:
        released()
        held.append(served._base.cache.nbytes)
        served.submit(Command("close"))

    monkeypatch.setattr(served._base, "release", close_after_release)
    served.submit(Command("sample", 1, ((1, 2, 3), 2, SamplingParams(max_tokens=5, seed=1), PolicyRef("any"))))
    served.run()
    assert held[0] > 0
    assert held[1] > 0  # nothing is given back between requests
    assert held[2] == 0


def test_answers_are_the_same_from_buffers_that_were_given_back(narrow: Any) -> None:
    prompt = (1, 2, 3, 4)

    def answer(batch: Batch) -> list[Any]:
        job = Job(1, prompt, 3, SamplingParams(max_tokens=100), BASE, 100, 7)
        batch.admit([job])
        while job.open:
            batch.step()
        (first, *_) = completions = [completion for completion in job.done if completion]
        with torch.no_grad():
            logits = narrow(torch.tensor([prompt + first.token_ids])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(first.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(first.logprobs), expected, atol=1e-5, rtol=0)
        return [completion.token_ids for completion in completions]

    batch = Batch(narrow, ())
    before = answer(batch)
    batch.release()
    assert batch.cache.nbytes == 0
    assert answer(batch) == before


def answers_of(model: Any, jobs: int, memory: int | None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Answers of an engine to so many requests of 2 candidates, where buffers of more than `memory` bytes fail."""
    answers: dict[int, Answer] = {}

    def emit(some: list[Answer]) -> None:
        answers.update({answer.id: answer for answer in some})
        if len(answers) == jobs:
            served.submit(Command("info", 99))
        if 99 in answers:
            served.submit(Command("close"))

    served = open_engine(model, emit)
    step = Batch.step

    def allocate(batch: Batch) -> list[Job]:
        if memory is not None and batch.cache.nbytes > memory:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(batch)

    monkeypatch.setattr(Batch, "step", allocate)
    for id in range(jobs):
        prompt = tuple(range(1, 4 + id))
        how = SamplingParams(max_tokens=40, seed=id, top_logprobs=2)
        served.submit(Command("sample", id, (prompt, 2, how, PolicyRef("any"))))
    served.run()
    return answers


def test_requests_wait_in_the_queue_again_when_memory_runs_out(
    narrow: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = answers_of(narrow, 12, None, monkeypatch)
    assert expected[99].value.counters == {}
    monkeypatch.undo()
    # 24 rows are admitted, then 12, then 6. Each has 64 columns, and there is memory for 8 of them.
    answers = answers_of(narrow, 12, 8 * 64 * 2 * 16 * 4, monkeypatch)
    assert answers[99].value.counters["out_of_memory"] == 2
    for id in range(12):
        assert [c.token_ids for c in answers[id].value] == [c.token_ids for c in expected[id].value]
        assert [len(c.top) for c in answers[id].value] == [40, 40]
    assert [record.message.count("ran out of memory") for record in caplog.records] == [1]


def test_a_request_that_alone_has_no_memory_is_refused_and_others_are_served(
    narrow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = answers_of(narrow, 3, 1, monkeypatch)
    for id in range(3):
        assert "no memory for 2 candidates of up to" in str(answers[id].error)
