"""What is particular to the transformers engine: architectures, failures, moving rows, drawing."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import Qwen3Config, Qwen3NextConfig

from cotune.errors import ConfigError, RequestRefused, SamplerError, SampleTimeout
from cotune.integrations.models import bfloat16
from cotune.integrations.models.chat.grammar import Matcher
from cotune.integrations.models.transformers import attention
from cotune.integrations.models.transformers.attention import SharedColumns
from cotune.integrations.models.transformers.batch import BASE, Batch
from cotune.integrations.models.transformers.cache import attention_only
from cotune.integrations.models.transformers.draw import RowParams, draw, random_streams, truncate, uniforms
from cotune.integrations.models.transformers.rows import Job, arrange_rows
from cotune.integrations.models.transformers.sampler import TransformersSampler
from cotune.records.policies import LoraSpec
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import Completion, SamplingParams
from tests.integrations import tiny_models

pytestmark = pytest.mark.slow

torch.set_num_threads(1)
PROMPTS = [list(range(20, 20 + length)) for length in (3, 40, 11)]
BASE_POLICY = PolicyRef("any")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny_models.build("qwen3", tmp_path_factory.mktemp("qwen3"))


def test_a_large_model_takes_the_threads_that_are_there(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)

    async def threads(asked: int | None) -> int:
        sampler = await TransformersSampler.open(qwen, host="thread", threads=asked, end_token_ids=())
        try:
            return sampler._host._engine.threads
        finally:
            await sampler.aclose()

    assert asyncio.run(threads(None)) == 1
    assert asyncio.run(threads(2)) == 2
    monkeypatch.setattr(bfloat16, "LARGE", qwen.num_parameters())
    assert asyncio.run(threads(None)) == 7


def gap(model: Any, prompt: list[int], completion: Completion) -> float:
    ids = torch.tensor([[*prompt, *completion.token_ids]])
    with torch.inference_mode():
        logprobs = torch.log_softmax(model(ids).logits[0, len(prompt) - 1 : -1], -1)
    expected = logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
    return float(np.abs(expected - np.array(completion.logprobs)).max())


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "bloom", "qwen3-sliding"])
def test_logprobs_of_every_architecture(architecture: str, tmp_path: Path) -> None:
    model = tiny_models.build(architecture, tmp_path)

    async def scenario() -> list[list[Completion]]:
        sampler = await TransformersSampler.open(tmp_path, host="thread")
        how = SamplingParams(max_tokens=30)
        answers = await asyncio.gather(*(sampler.sample(p, 2, how, BASE_POLICY) for p in PROMPTS))
        await sampler.aclose()
        return list(answers)

    for prompt, completions in zip(PROMPTS, asyncio.run(scenario()), strict=True):
        assert max(gap(model, prompt, c) for c in completions) < 1e-4


def test_an_adapter_on_modules_that_are_not_linear(tmp_path: Path) -> None:
    torch.manual_seed(1)
    spec = LoraSpec(rank=4, alpha=8.0, targets=("c_attn",))
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True)
    tuned = get_peft_model(tiny_models.build("gpt2", tmp_path), config).eval()
    weights = {name: t.detach().numpy() for name, t in get_peft_model_state_dict(tuned).items()}

    async def scenario() -> list[Completion]:
        sampler = await TransformersSampler.open(tmp_path, host="thread")
        await sampler.publish(PolicyRef("a", 1), weights, spec)
        answer = await sampler.sample(PROMPTS[0], 2, SamplingParams(max_tokens=20), PolicyRef("a", 1))
        await sampler.aclose()
        return answer

    assert max(gap(tuned, PROMPTS[0], c) for c in asyncio.run(scenario())) < 1e-4


def test_models_that_keep_more_than_keys_and_values_are_told_apart() -> None:
    linear = Qwen3NextConfig(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    assert not attention_only(linear)
    assert not attention_only(Qwen3Config(num_hidden_layers=1, layer_types=["chunked_attention"]))
    assert attention_only(tiny_models.config("qwen3-sliding", 64))


async def loaded(model: Any, **options: Any) -> TransformersSampler:
    return await TransformersSampler.open(model, host="thread", tokenizer=tiny_models.tokenizer(), **options)


def test_when_the_engine_fails_all_pending_requests_get_the_cause(tmp_path: Path) -> None:
    model = tiny_models.build("qwen3", tmp_path)

    async def scenario() -> None:
        sampler = await loaded(model)

        def broken(*args: object, **kwargs: object) -> None:
            raise RuntimeError("out of memory, say")

        model.forward = broken
        requests = [sampler.sample(PROMPTS[0], 2, SamplingParams(), BASE_POLICY) for _ in range(3)]
        failures = await asyncio.gather(*requests, return_exceptions=True)
        assert [type(f) for f in failures] == [SamplerError] * 3
        assert all("RuntimeError: out of memory, say" in str(f) for f in failures)
        with pytest.raises(SamplerError, match="out of memory"):
            await sampler.info()
        await sampler.aclose()

    asyncio.run(scenario())


def test_an_engine_that_hangs_does_not_hang_the_caller(tmp_path: Path) -> None:
    model = tiny_models.build("qwen3", tmp_path)
    release, forward = threading.Event(), model.forward

    def hanging(*args: object, **kwargs: object) -> object:
        release.wait()
        return forward(*args, **kwargs)

    model.forward = hanging

    async def scenario() -> None:
        sampler = await loaded(model)
        with pytest.raises(SampleTimeout):
            await sampler.sample(PROMPTS[0], 2, SamplingParams(timeout=0.05), BASE_POLICY)
        release.set()
        assert len(await sampler.sample(PROMPTS[0], 2, SamplingParams(max_tokens=2), BASE_POLICY)) == 2
        await sampler.aclose()

    asyncio.run(scenario())


def test_a_killed_process_fails_what_is_pending_with_its_exit_code(tmp_path: Path) -> None:
    tiny_models.build("qwen3", tmp_path)

    async def scenario() -> None:
        sampler = await TransformersSampler.open(tmp_path, host="process")
        pending = asyncio.create_task(sampler.sample(PROMPTS[0], 8, SamplingParams(max_tokens=450), BASE_POLICY))
        await asyncio.sleep(0)
        os.kill(sampler._host._process.pid, signal.SIGKILL)
        with pytest.raises(SamplerError, match="ended with code -9"):
            await pending
        with pytest.raises(SamplerError, match="ended with code -9"):
            await sampler.info()
        await sampler.aclose()

    asyncio.run(scenario())


def test_a_missing_model_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere") as caught:
        asyncio.run(TransformersSampler.open(tmp_path / "nowhere"))
    assert caught.value.field == "model"


def test_what_fails_in_the_process_while_loading_arrives_as_the_same_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="model = ") as caught:
        asyncio.run(TransformersSampler.open(tmp_path, host="process"))
    assert caught.value.value == str(tmp_path)


def test_a_host_that_does_not_exist_and_one_that_does_not_fit(qwen: Any) -> None:
    with pytest.raises(ConfigError, match="'cloud'"):
        asyncio.run(TransformersSampler.open(qwen, host="cloud"))
    with pytest.raises(ConfigError, match="a model that is already loaded"):
        asyncio.run(TransformersSampler.open(qwen, host="process"))


def test_a_token_that_the_grammar_allows_and_then_does_not_take_fails_the_request(
    qwen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Matcher, "consume", lambda matcher, token: not matcher.words)

    async def work() -> list[Completion]:
        sampler = await loaded(qwen)
        try:
            shaped = SamplingParams(grammar='start: "a" /[b-d]/', max_tokens=4)
            with pytest.raises(RequestRefused, match="at position 0 of a reply was allowed by its grammar"):
                await sampler.sample(PROMPTS[0], 3, shaped, BASE_POLICY)
            return await sampler.sample(PROMPTS[0], 2, SamplingParams(max_tokens=4), BASE_POLICY)
        finally:
            await sampler.aclose()

    assert len(asyncio.run(work())) == 2, "others are answered as before"


def test_more_candidates_than_rows_and_stop_strings_without_a_tokenizer_are_refused(qwen: Any) -> None:
    async def scenario() -> None:
        sampler = await TransformersSampler.open(qwen, host="thread", max_batch_rows=4)
        with pytest.raises(SamplerError, match="1 to 4"):
            await sampler.sample(PROMPTS[0], 5, SamplingParams(), BASE_POLICY)
        with pytest.raises(SamplerError, match="tokenizer"):
            await sampler.sample(PROMPTS[0], 1, SamplingParams(stop=("x",)), BASE_POLICY)
        await sampler.aclose()

    asyncio.run(scenario())


def test_a_small_token_budget_serves_requests_one_after_another(qwen: Any) -> None:
    async def scenario() -> list[list[Completion]]:
        sampler = await loaded(qwen, max_batch_tokens=1)
        how = SamplingParams(max_tokens=5)
        answers = await asyncio.gather(*(sampler.sample(p, 2, how, BASE_POLICY) for p in PROMPTS))
        await sampler.aclose()
        return list(answers)

    assert [len(a) for a in asyncio.run(scenario())] == [2, 2, 2]


arrivals = st.lists(
    st.tuples(st.integers(0, 6), st.integers(1, 70), st.integers(1, 4), st.integers(1, 90), st.booleans()),
    min_size=1,
    max_size=6,
)


@settings(max_examples=6, deadline=None)
@given(arrivals)
def test_replies_do_not_depend_on_who_comes_and_goes(qwen: Any, plan: list[tuple[int, int, int, int, bool]]) -> None:
    """Jobs (steps to wait, prompt length, n, limit, cancelled half-way) in one batch answer as each does alone."""

    def job(i: int) -> Job:
        _, length, n, limit, _ = plan[i]
        prompt = tuple(10 + (i + j) % 200 for j in range(length))
        return Job(i, prompt, n, SamplingParams(temperature=0.5), BASE, limit, seed=i)

    def alone(i: int) -> list[Completion | None]:
        batch, one = Batch(qwen, [2]), job(i)
        batch.admit([one])
        while one.open:
            batch.step()
        return one.done

    batch, jobs, steps = Batch(qwen, [2]), [job(i) for i in range(len(plan))], 0
    for one, (wait, *_, cancelled) in zip(jobs, plan, strict=True):
        batch.admit([one])
        for _ in range(wait):
            steps += bool(batch.rows)
            if batch.rows:
                batch.step()
        if cancelled:
            batch.cancel(one)
    while batch.rows:
        batch.step()
    for i, one in enumerate(jobs):
        if not plan[i][4]:
            expected = alone(i)
            assert [c.token_ids for c in one.done] == [c.token_ids for c in expected]
            for c, d in zip(one.done, expected, strict=True):
                assert np.allclose(c.logprobs, d.logprobs, atol=1e-4)


def test_candidates_of_one_prompt_read_it_once(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [((5, 6, 7, 8, 9), 3, 12), ((7, 8), 1, 4), ((5, 6, 7), 4, 9), (tuple(range(9, 30)), 2, 20), ((3, 4), 2, 9)]

    def replies() -> tuple[list[Any], list[SharedColumns]]:
        seen: list[SharedColumns] = []
        inner = attention._attend_shared

        def spied(query: Any, key: Any, value: Any, mask: Any, alike: SharedColumns) -> Any:
            seen.append(alike)
            return inner(query, key, value, mask, alike)

        batch = Batch(qwen, [2])
        asked = [
            Job(i, prompt, n, SamplingParams(temperature=0.7), BASE, limit, seed=i)
            for i, (prompt, n, limit) in enumerate(jobs)
        ]
        with monkeypatch.context() as patch:
            patch.setattr(attention, "_attend_shared", spied)
            batch.admit(asked[:3])
            for late in asked[3:]:  # one comes when rows have gone, one leaves half-way
                for _ in range(5):
                    batch.step()
                batch.admit([late])
            batch.step()
            batch.cancel(asked[4])
            while batch.rows:
                batch.step()
        return [c for job in asked[:4] for c in job.done], seen

    apart, none = replies()
    monkeypatch.setattr(attention, "WORTH", 0)
    together, seen = replies()
    assert not none
    assert seen[0] == SharedColumns(5, [(0, 3), (3, 4), (4, 8)])
    assert [c.token_ids for c in together] == [c.token_ids for c in apart]
    for one, other in zip(together, apart, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


kinds = st.lists(st.integers(-1, 3), max_size=12)


@given(st.lists(st.tuples(st.integers(-1, 3), st.booleans()), max_size=20), kinds)
def test_rows_are_arranged_by_kind_without_gaps_and_few_move(rows: list[tuple[int, bool]], new: list[int]) -> None:
    rows.sort(key=lambda row: row[0])
    live = np.flatnonzero([alive for _, alive in rows])
    live_kinds = np.array([rows[i][0] for i in live], np.int64)
    to, at = arrange_rows(live, live_kinds, np.array(new, np.int64))
    layout = dict(zip([*to, *at], [*live_kinds, *new], strict=True))
    assert sorted(layout) == list(range(len(live) + len(new)))
    assert [layout[i] for i in sorted(layout)] == sorted(layout.values())
    if len(live) == len(rows) and not new:
        assert (to == live).all()


def row_params(rows: int, **changes: Any) -> RowParams:
    return RowParams(
        **{"temperature": torch.ones(rows, 1), "greedy": None, "all_greedy": False, "top_k": None} | changes
    )


def test_draws_follow_the_distribution() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.0, 0.25]]))
    uniform = torch.tensor([[0.0], [0.49], [0.51], [0.74], [0.76], [1 - 2.0**-23]])
    token, logprob = draw(logits.expand(6, -1), uniform, row_params(6, top_p=None))
    assert token.tolist() == [0, 0, 1, 1, 3, 3]
    assert logprob.exp().tolist() == pytest.approx([0.5, 0.5, 0.25, 0.25, 0.25, 0.25])


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(0, 2**32), st.sampled_from([0.0, 0.3, 1 - 2.0**-23]))
def test_a_token_of_probability_zero_is_never_drawn(size: int, seed: int, u: float) -> None:
    logits = torch.randn(4, size, generator=torch.Generator().manual_seed(seed)) * 10
    logits[:, torch.rand(size, generator=torch.Generator().manual_seed(seed)) < 0.5] = -torch.inf
    logits[:, seed % size] = 0.0
    token, logprob = draw(logits, torch.full((4, 1), u), row_params(4, top_p=None))
    assert logprob.isfinite().all()
    expected = torch.log_softmax(logits, -1).gather(1, token[:, None])[:, 0]
    assert torch.allclose(logprob, expected, atol=1e-5)


def test_greedy_and_sampled_rows_share_a_draw() -> None:
    logits = torch.log(torch.tensor([[0.6, 0.4], [0.6, 0.4]]))
    greedy = torch.tensor([[True], [False]])
    token, logprob = draw(logits, torch.full((2, 1), 0.9), row_params(2, greedy=greedy, top_p=None))
    assert token.tolist() == [0, 1]
    assert logprob.exp().tolist() == pytest.approx([0.6, 0.4])


def test_truncation_keeps_the_smallest_set_that_reaches_top_p() -> None:
    x = torch.log(torch.tensor([[0.1, 0.5, 0.2, 0.2]])).expand(4, -1)
    top_k, top_p = torch.tensor([[0], [2], [0], [1]]), torch.tensor([[0.5], [1.0], [0.6], [1.0]])
    kept = truncate(x, top_k, top_p).isfinite()
    assert kept.sum(-1).tolist() == [1, 2, 2, 1]
    assert kept[:, 1].all()


def test_a_temperature_close_to_zero_draws_the_likeliest_token(qwen: Any) -> None:
    async def tokens(temperature: float) -> list[tuple[int, ...]]:
        sampler = await TransformersSampler.open(qwen, host="thread", end_token_ids=())
        try:
            how = SamplingParams(temperature=temperature, max_tokens=6)
            return [c.token_ids for c in await sampler.sample(PROMPTS[0], 2, how, BASE_POLICY)]
        finally:
            await sampler.aclose()

    assert asyncio.run(tokens(1e-40)) == asyncio.run(tokens(0.0))


def test_random_numbers_depend_on_seed_candidate_and_position_only() -> None:
    first, second = random_streams(7, 3), random_streams(7, 5)
    assert (first == second[:3]).all()
    assert len({int(s) for seed in range(50) for s in random_streams(seed, 8)}) == 400
    u = np.concatenate([uniforms(random_streams(seed, 100), np.full(100, p)) for seed in range(20) for p in range(10)])
    assert u.min() >= 0.0
    assert u.max() < 1.0
    assert abs(u.mean() - 0.5) < 0.01
    assert np.abs(np.histogram(u, 20, (0, 1))[0] / len(u) - 0.05).max() < 0.01


@pytest.mark.parametrize("seconds", [0.0, 0.3, 1.0])
def test_a_sampler_that_nobody_waits_for_leaves_no_process(tmp_path: Path, seconds: float) -> None:
    tiny_models.build("qwen3", tmp_path)
    before = set(psutil.Process().children())

    async def scenario() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(seconds):
                await TransformersSampler.open(tmp_path, host="process")

    asyncio.run(scenario())
    _, alive = psutil.wait_procs(set(psutil.Process().children()) - before, timeout=60)
    assert alive == []
    assert set(psutil.Process().children()) <= before
