"""What every sampler must do. A sampler joins by adding its factory to SAMPLERS."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

from cotune.errors import RequestRefused, SamplerError, SampleTimeout
from cotune.integrations.cluster.router.router import RoutedSampler
from cotune.integrations.cluster.sampler import start_sampler
from cotune.integrations.models.transformers.sampler import TransformersSampler
from cotune.records.policies import ALL_LINEAR, LoraSpec
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import NEVER, Completion, Sampler, SamplingParams, Weights, fingerprint
from tests.integrations import tiny_models
from tests.integrations.conftest import client_of

torch.set_num_threads(1)


async def in_thread(folder: Path) -> Sampler:
    return await TransformersSampler.open(folder, host="thread")


async def in_process(folder: Path) -> Sampler:
    return await TransformersSampler.open(folder, host="process")


async def few_rows(folder: Path) -> Sampler:
    return await TransformersSampler.open(folder, host="thread", max_batch_rows=11)


async def in_ray(folder: Path) -> Sampler:
    factory = "cotune.integrations.models.transformers.sampler:TransformersSampler.open"
    return await start_sampler(factory, {"model": str(folder), "host": "thread"})


async def open_routed(folder: str) -> Sampler:
    """Runs in the router's actor."""
    return await RoutedSampler.open([functools.partial(in_thread, Path(folder))] * 2)


async def routed(folder: Path) -> Sampler:
    return await start_sampler(f"{__name__}:open_routed", {"folder": str(folder)})


SAMPLERS: dict[str, Callable[[Path], Awaitable[Sampler]]] = {
    "thread": in_thread,
    "process": in_process,
    "few-rows": few_rows,
    "ray": in_ray,
    "routed-ray": routed,
}
ENGINES = {"vllm-url": "vllm_by_url", "vllm-ray": "vllm_in_ray"}
"""Samplers on an engine that takes minutes to start: by name, the fixture that starts it once for all tests."""

LONG = ("ray", "routed-ray")
"""Others have their parts: `vllm-ray` has an engine in an actor, `test_router.py` routes among engines that fail, and
`test_cluster.py` of the runs among engines in actors."""

NAMES = [
    *(pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in SAMPLERS),
    *(pytest.param(name, marks=pytest.mark.timeout(900)) for name in ENGINES),
]

maths = pytest.mark.parametrize("sampler", ["thread", NAMES[-1]], indirect=True)
"""What an engine computes is checked once per engine; how it is reached (process, actor, router, server) adds errors,
cancellation, time-outs, versions and closing, which are checked on all."""

LORA = LoraSpec(rank=4, alpha=8.0)
BASE = PolicyRef("anyone")
TOKENS = len(tiny_models.tokenizer())
"""The token ids of the tests' model; its other logits are padding."""
END = 2
"""The token that ends a reply of the tests' models."""
PROMPTS = [[1, *range(20, 20 + length)] for length in (3, 40, 11, 27)]


@dataclass
class Reference:
    """The same model in plain transformers and PEFT, and the adapters to publish."""

    folder: Path
    base: Any
    adapters: dict[str, Any]
    weights: dict[str, Weights]

    def logprobs(self, adapter: str | None, prompt: list[int], reply: tuple[int, ...], temperature: float) -> Any:
        found = self.distributions(adapter, prompt, reply, temperature)
        return found.gather(1, torch.tensor(reply)[:, None])[:, 0].numpy()

    def distributions(self, adapter: str | None, prompt: list[int], reply: tuple[int, ...], temperature: float) -> Any:
        model = self.base if adapter is None else self.adapters[adapter]
        ids = torch.tensor([[*prompt, *reply]])
        with torch.inference_mode():
            logits = model(ids).logits[0, len(prompt) - 1 : -1]
            logits[:, TOKENS:] = -torch.inf  # ids of the padded vocabulary cannot be drawn
        return torch.log_softmax(logits / temperature, -1)

    def prompt_of_long_reply(self, new: int) -> list[int]:
        """A prompt whose likeliest reply does not end within so many tokens."""
        return next(prompt for prompt in PROMPTS if END not in self.greedy(None, prompt, new))

    def greedy(self, adapter: str | None, prompt: list[int], new: int) -> tuple[int, ...]:
        model = self.base if adapter is None else self.adapters[adapter]
        ids = torch.tensor([prompt])
        padding = list(range(TOKENS, model.config.vocab_size))
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            do_sample=False,
            suppress_tokens=padding,
        )
        return tuple(out[0, len(prompt) :].tolist())


def lora_model(folder: Path, seed: int) -> Any:
    base = tiny_models.Qwen3ForCausalLM.from_pretrained(folder)
    torch.manual_seed(seed)
    config = LoraConfig(r=LORA.rank, lora_alpha=LORA.alpha, target_modules=list(ALL_LINEAR), init_lora_weights=False)
    return get_peft_model(base, config).eval()


def peft_weights(model: Any) -> Weights:
    return {name: t.detach().numpy().copy() for name, t in get_peft_model_state_dict(model).items()}


@pytest.fixture(scope="session")
def reference(contract_model: Path) -> Reference:
    folder = contract_model
    base = tiny_models.Qwen3ForCausalLM.from_pretrained(folder).eval()
    adapters = {name: lora_model(folder, seed) for seed, name in enumerate(("planner", "coder", "newer"), start=1)}
    return Reference(folder, base, adapters, {name: peft_weights(m) for name, m in adapters.items()})


@pytest.fixture(scope="module", params=NAMES)
def sampler(request: pytest.FixtureRequest, reference: Reference) -> Iterator[Sampler]:
    """One engine for all tests of the module: it must outlive event loops, and no test may spoil it."""
    opened = open_sampler(request, request.param, reference)
    refs = PolicyRef("planner", 1), PolicyRef("coder", 1)
    for ref in refs:
        run(opened.publish(ref, reference.weights[ref.name], LORA))
    yield opened
    if request.param in ENGINES:
        for ref in refs:
            run(opened.retire(ref))
    else:
        run(opened.aclose())


@pytest.fixture(scope="module", params=["thread", pytest.param("vllm-ray", marks=pytest.mark.timeout(900))])
def full_sampler(request: pytest.FixtureRequest, reference: Reference) -> Iterator[Sampler]:
    """An engine for full weights: vLLM holds those of one version at a time, so it needs one of its own."""
    if request.param in ENGINES:
        yield request.getfixturevalue("vllm_full")
    else:
        opened = run(SAMPLERS[request.param](reference.folder))
        yield opened
        run(opened.aclose())


def open_sampler(request: pytest.FixtureRequest, name: str, reference: Reference) -> Sampler:
    if name in ENGINES:
        return request.getfixturevalue(ENGINES[name])
    if "ray" in name:
        request.getfixturevalue("ray_runtime")
    return run(SAMPLERS[name](reference.folder))


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, **changes})


def endless(**changes: Any) -> SamplingParams:
    """The longest that a request can take: 480 tokens of each candidate, as no end token is drawn."""
    return params(max_tokens=480, logit_bias=((END, NEVER),), **changes)


async def ask(sampler: Sampler, policy: PolicyRef, how: SamplingParams, n: int = 3) -> list[list[Completion]]:
    return list(await asyncio.gather(*(sampler.sample(p, n, how, policy) for p in PROMPTS)))


def gap(reference: Reference, adapter: str | None, answers: list[list[Completion]], temperature: float) -> float:
    return max(
        float(np.abs(reference.logprobs(adapter, p, c.token_ids, temperature) - np.array(c.logprobs)).max())
        for p, completions in zip(PROMPTS, answers, strict=True)
        for c in completions
    )


@maths
def test_greedy_tokens_equal_generate(sampler: Sampler, reference: Reference) -> None:
    answers = run(ask(sampler, BASE, params(temperature=0.0), n=2))
    for prompt, completions in zip(PROMPTS, answers, strict=True):
        assert [c.token_ids for c in completions] == [reference.greedy(None, prompt, 12)] * 2


@maths
def test_greedy_tokens_of_an_adapter_equal_generate(sampler: Sampler, reference: Reference) -> None:
    answers = run(ask(sampler, PolicyRef("coder", 1), params(temperature=0.0), n=1))
    for prompt, completions in zip(PROMPTS, answers, strict=True):
        assert completions[0].token_ids == reference.greedy("coder", prompt, 12)


@maths
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("adapter", [None, "planner"])
def test_logprobs_equal_a_plain_forward_pass(
    sampler: Sampler, reference: Reference, adapter: str | None, temperature: float
) -> None:
    policy = PolicyRef(adapter, 1) if adapter else BASE
    answers = run(ask(sampler, policy, params(temperature=temperature)))
    assert gap(reference, adapter, answers, temperature) < 1e-4


@maths
def test_greedy_logprobs_are_those_of_the_model(sampler: Sampler, reference: Reference) -> None:
    answers = run(ask(sampler, BASE, params(temperature=0.0), n=1))
    assert gap(reference, None, answers, 1.0) < 1e-4


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_the_likeliest_tokens_are_those_of_the_distribution_that_was_drawn_from(
    sampler: Sampler, reference: Reference, temperature: float
) -> None:
    how = params(temperature=temperature, seed=3, max_tokens=5)

    async def together() -> list[list[Completion]]:
        telling = msgspec.structs.replace(how, top_logprobs=5)
        asked = ((PROMPTS[1], 2, telling), (PROMPTS[2], 3, how))
        return list(await asyncio.gather(*(sampler.sample(p, n, h, PolicyRef("coder", 1)) for p, n, h in asked)))

    told, untold = run(together())
    assert tokens(told) == tokens(run(sampler.sample(PROMPTS[1], 2, how, PolicyRef("coder", 1))))
    assert [c.top for c in untold] == [()] * 3
    for c in told:
        expected = reference.distributions("coder", PROMPTS[1], c.token_ids, temperature or 1.0)
        assert len(c.top) == len(c.token_ids)
        for place, (token, logprob) in enumerate(zip(c.token_ids, c.logprobs, strict=True)):
            best = expected[place].topk(5)
            assert [id for id, _ in c.top[place]] == best.indices.tolist()
            assert [p for _, p in c.top[place]] == pytest.approx(best.values.tolist(), abs=1e-4)
            assert dict(c.top[place]).get(token, logprob) == pytest.approx(logprob, abs=1e-6)


@maths
@pytest.mark.parametrize("adapter", [None, "planner"])
def test_ids_of_a_padded_vocabulary_are_never_drawn(
    sampler: Sampler, reference: Reference, adapter: str | None
) -> None:
    how = params(seed=11, max_tokens=40, top_logprobs=20, logit_bias=((END, NEVER), (70, 1.0)))
    policy = PolicyRef(adapter, 1) if adapter else BASE
    answers = run(ask(sampler, policy, how, n=4))
    drawn = [token for completions in answers for c in completions for token in c.token_ids]
    told = [token for completions in answers for c in completions for place in c.top for token, _ in place]
    assert len(drawn) == 4 * 4 * 40
    # The model gives the padding a fifth of all probability: hundreds of these tokens would be drawn.
    model = reference.adapters[adapter] if adapter else reference.base
    with torch.inference_mode():
        shares = model(torch.tensor([PROMPTS[1]])).logits[0].softmax(-1)[:, TOKENS:].sum(-1)
    assert shares.mean() > 0.1
    assert max(drawn) < TOKENS
    assert max(told) < TOKENS


@maths
def test_what_cannot_be_drawn_is_not_among_the_likeliest(sampler: Sampler) -> None:
    (told,) = run(sampler.sample(PROMPTS[0], 1, params(top_k=2, top_logprobs=20, max_tokens=4), BASE))
    assert [len(place) for place in told.top] == [2] * len(told.token_ids)
    assert [sum(np.exp(p) for _, p in place) for place in told.top] == pytest.approx([1.0] * len(told.top), abs=1e-4)
    assert all(token in dict(place) for token, place in zip(told.token_ids, told.top, strict=True))


@maths
def test_regression_per_role_lora_the_adapter_never_switched(sampler: Sampler, reference: Reference) -> None:
    async def together() -> list[list[list[Completion]]]:
        policies = [PolicyRef("planner", 1), BASE, PolicyRef("coder", 1)]
        return list(await asyncio.gather(*(ask(sampler, p, params(seed=5)) for p in policies)))

    planner, base, coder = run(together())
    assert gap(reference, "planner", planner, 1.0) < 1e-4
    assert gap(reference, None, base, 1.0) < 1e-4
    assert gap(reference, "coder", coder, 1.0) < 1e-4
    assert gap(reference, "coder", planner, 1.0) > 0.1
    assert gap(reference, "planner", coder, 1.0) > 0.1


@maths
def test_a_mixed_batch_equals_separate_runs(sampler: Sampler) -> None:
    roles, how = [PolicyRef("planner", 1), PolicyRef("coder", 1), BASE], params(seed=3)

    async def together() -> list[list[list[Completion]]]:
        return list(await asyncio.gather(*(ask(sampler, role, how) for role in roles)))

    mixed = run(together())
    alone = [run(ask(sampler, role, how)) for role in roles]
    assert tokens(mixed) == tokens(alone)


def tokens(answers: Any) -> Any:
    return answers.token_ids if isinstance(answers, Completion) else [tokens(a) for a in answers]


@maths
def test_n_candidates_differ_and_each_has_one_logprob_per_token(sampler: Sampler) -> None:
    answer = run(sampler.sample(PROMPTS[0], 7, params(logit_bias=((END, NEVER),)), BASE))  # two may end at once
    assert len(answer) == 7
    assert len(set(tokens(answer))) == 7
    assert all(len(c.logprobs) == len(c.token_ids) for c in answer)


@maths
def test_a_seed_fixes_the_candidates_whatever_else_runs(sampler: Sampler) -> None:
    how = params(seed=11, temperature=0.8)
    alone = run(sampler.sample(PROMPTS[1], 4, how, BASE))

    async def crowded() -> list[Completion]:
        others = [asyncio.create_task(ask(sampler, PolicyRef("coder", 1), params(seed=i), n=2)) for i in range(3)]
        answer = await sampler.sample(PROMPTS[1], 4, how, BASE)
        await asyncio.gather(*others)
        return answer

    assert tokens(run(crowded())) == tokens(alone)
    assert tokens(run(sampler.sample(PROMPTS[1], 4, params(seed=12, temperature=0.8), BASE))) != tokens(alone)


@maths
def test_without_a_seed_two_requests_differ(sampler: Sampler) -> None:
    first, second = (run(sampler.sample(PROMPTS[0], 2, params(), BASE)) for _ in range(2))
    assert tokens(first) != tokens(second)


@maths
def test_an_end_token_ends_a_candidate_and_belongs_to_it(sampler: Sampler) -> None:
    async def scenario() -> list[Completion]:
        hows = [params(temperature=2.0, max_tokens=100, seed=seed) for seed in range(6)]
        drawn = await asyncio.gather(*(sampler.sample(PROMPTS[0], 10, how, BASE) for how in hows))
        return [candidate for candidates in drawn for candidate in candidates]

    answer = run(scenario())
    stopped = [c for c in answer if c.finish_reason == "stop"]
    assert stopped
    assert all(c.token_ids[-1] == 2 and 2 not in c.token_ids[:-1] for c in stopped)
    assert all(len(c.token_ids) == 100 and 2 not in c.token_ids for c in answer if c.finish_reason == "length")


@maths
def test_max_tokens_is_exact(sampler: Sampler) -> None:
    for most in (1, 2, 9):
        answer = run(sampler.sample(PROMPTS[0], 3, params(max_tokens=most, temperature=0.0), BASE))
        assert [(len(c.token_ids), c.finish_reason) for c in answer] == [(most, "length")] * 3


@maths
def test_a_stop_string_ends_a_candidate(sampler: Sampler, reference: Reference) -> None:
    tokenizer = tiny_models.tokenizer()
    prompt = reference.prompt_of_long_reply(20)
    full = run(sampler.sample(prompt, 1, params(temperature=0.0, max_tokens=20), BASE))[0]
    stop = tokenizer.decode(list(full.token_ids[6:9]))
    end = next(i for i in range(1, 21) if stop in tokenizer.decode(list(full.token_ids[:i])))
    how = params(temperature=0.0, max_tokens=20, stop=("never there", stop))
    answer = run(sampler.sample(prompt, 2, how, BASE))
    assert [(c.token_ids, c.finish_reason) for c in answer] == [(full.token_ids[:end], "stop")] * 2


def test_a_stop_token_ends_a_candidate(sampler: Sampler, reference: Reference) -> None:
    prompt = reference.prompt_of_long_reply(20)
    full = run(sampler.sample(prompt, 1, params(temperature=0.0, max_tokens=20), BASE))[0]
    stop = full.token_ids[7]
    end = full.token_ids.index(stop) + 1
    how = params(temperature=0.0, max_tokens=20, stop_token_ids=(stop,))
    answer = run(sampler.sample(prompt, 2, how, BASE))
    assert [(c.token_ids, c.finish_reason) for c in answer] == [(full.token_ids[:end], "stop")] * 2


@maths
@pytest.mark.parametrize("alone", [{"top_k": 1}, {"top_p": 0.0}])
def test_the_likeliest_token_alone_is_greedy_with_certainty(
    sampler: Sampler, reference: Reference, alone: dict[str, float]
) -> None:
    answer = run(sampler.sample(PROMPTS[0], 2, params(**alone), BASE))
    assert tokens(answer) == [reference.greedy(None, PROMPTS[0], 12)] * 2
    assert np.allclose(answer[0].logprobs, 0.0, atol=1e-6)


@maths
def test_top_p_logprobs_are_of_the_truncated_distribution(sampler: Sampler, reference: Reference) -> None:
    answer = run(sampler.sample(PROMPTS[0], 8, params(max_tokens=1, top_p=0.5, seed=1), BASE))
    p, order = reference.distributions(None, PROMPTS[0], (0,), 1.0)[0].exp().sort(descending=True)
    kept = int((p.cumsum(0) < 0.5).sum()) + 1
    expected = dict(zip(order[:kept].tolist(), torch.log(p[:kept] / p[:kept].sum()).tolist(), strict=True))
    for c in answer:
        assert c.logprobs[0] == pytest.approx(expected[c.token_ids[0]], abs=1e-4)


def test_a_prompt_longer_than_the_model_is_refused_with_both_numbers(sampler: Sampler) -> None:
    with pytest.raises(SamplerError, match=r"600 tokens.*511"):
        run(sampler.sample([5] * 600, 1, params(), BASE))


@maths
def test_a_reply_never_outgrows_the_model(sampler: Sampler) -> None:
    answer = run(sampler.sample([5] * 505, 1, params(max_tokens=100, temperature=0.0), BASE))
    assert (len(answer[0].token_ids), answer[0].finish_reason) == (7, "length")


def test_an_unknown_version_is_refused_by_name(sampler: Sampler) -> None:
    with pytest.raises(SamplerError, match="planner@7 is not served"):
        run(sampler.sample(PROMPTS[0], 1, params(), PolicyRef("planner", 7)))


def test_publish_returns_the_fingerprint_of_what_was_sent_and_info_lists_it(
    sampler: Sampler, reference: Reference
) -> None:
    ref = PolicyRef("fresh", 4)
    assert run(sampler.publish(ref, reference.weights["newer"], LORA)) == fingerprint(reference.weights["newer"])
    assert run(sampler.info()).served["fresh@4"] == fingerprint(reference.weights["newer"])
    run(sampler.retire(ref))
    assert "fresh@4" not in run(sampler.info()).served


def test_a_retired_version_is_refused_while_its_running_requests_end(sampler: Sampler, reference: Reference) -> None:
    ref = PolicyRef("leaving", 1)

    async def scenario() -> list[Completion]:
        await sampler.publish(ref, reference.weights["newer"], LORA)
        running = asyncio.create_task(sampler.sample(PROMPTS[0], 2, params(max_tokens=60), ref))
        await asyncio.sleep(0)
        await sampler.info()
        await sampler.retire(ref)
        with pytest.raises(SamplerError, match="leaving@1 is not served"):
            await sampler.sample(PROMPTS[0], 1, params(), ref)
        return await running

    answer = run(scenario())
    expected = [reference.logprobs("newer", PROMPTS[0], c.token_ids, 1.0) for c in answer]
    assert all(np.allclose(c.logprobs, e, atol=1e-4) for c, e in zip(answer, expected, strict=True))
    with pytest.raises(SamplerError, match="not served"):
        run(sampler.retire(ref))


def test_a_version_published_under_load_is_served_and_older_requests_keep_theirs(
    sampler: Sampler, reference: Reference
) -> None:
    old, new = PolicyRef("moving", 1), PolicyRef("moving", 2)

    async def scenario() -> tuple[Any, Any, Any]:
        await sampler.publish(old, reference.weights["planner"], LORA)
        before = asyncio.create_task(ask(sampler, old, params(max_tokens=40)))
        await asyncio.sleep(0)
        await sampler.publish(new, reference.weights["newer"], LORA)
        after = await ask(sampler, new, params())
        late = await ask(sampler, old, params())
        return await before, after, late

    before, after, late = run(scenario())
    assert gap(reference, "planner", before, 1.0) < 1e-4
    assert gap(reference, "newer", after, 1.0) < 1e-4
    assert gap(reference, "planner", late, 1.0) < 1e-4
    for ref in (old, new):
        run(sampler.retire(ref))


def test_a_version_is_never_replaced(sampler: Sampler, reference: Reference) -> None:
    ref = PolicyRef("planner", 1)
    assert run(sampler.publish(ref, reference.weights["planner"], LORA)) == fingerprint(reference.weights["planner"])
    with pytest.raises(SamplerError, match="planner@1 was published before with other weights"):
        run(sampler.publish(ref, reference.weights["coder"], LORA))


def test_weights_that_are_not_finite_are_refused(sampler: Sampler, reference: Reference) -> None:
    broken = {name: np.full_like(array, np.nan) for name, array in reference.weights["coder"].items()}
    with pytest.raises(SamplerError, match="not finite"):
        run(sampler.publish(PolicyRef("broken", 1), broken, LORA))


def test_weights_of_another_model_are_refused(sampler: Sampler) -> None:
    with pytest.raises(SamplerError, match=r"layers\.9\.mlp"):
        stray = "base_model.model.model.layers.9.mlp.up_proj.lora_A.weight"
        run(sampler.publish(PolicyRef("stray", 1), {stray: np.zeros((4, 64), np.float32)}, LORA))


def tuned(reference: Reference, seed: int) -> Any:
    torch.manual_seed(seed)
    model = tiny_models.Qwen3ForCausalLM.from_pretrained(reference.folder).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + 0.1 * torch.randn_like(p))
    return model


def parameters(model: Any) -> Weights:
    return {name: p.detach().numpy() for name, p in model.named_parameters()}


def test_full_weights_are_served_beside_adapters(sampler: Sampler, reference: Reference) -> None:
    model = tuned(reference, 9)
    weights, ref = parameters(model), PolicyRef("full", 1)

    async def scenario() -> tuple[Any, Any]:
        assert await sampler.publish(ref, weights) == fingerprint(weights)
        return await asyncio.gather(ask(sampler, ref, params()), ask(sampler, PolicyRef("coder", 1), params()))

    if run(sampler.info()).name.startswith("vllm"):
        with pytest.raises(RequestRefused, match="full@1 has full weights"):
            run(scenario())
        assert gap(reference, "coder", run(ask(sampler, PolicyRef("coder", 1), params())), 1.0) < 1e-4
        return
    full, coder = run(scenario())
    assert gap(Reference(reference.folder, model, {}, {}), None, full, 1.0) < 1e-4
    assert gap(reference, "coder", coder, 1.0) < 1e-4
    run(sampler.retire(ref))


def test_a_full_policy_goes_through_its_versions(full_sampler: Sampler, reference: Reference) -> None:
    assert gap(reference, None, run(ask(full_sampler, BASE, params())), 1.0) < 1e-4
    if run(full_sampler.info()).name == "vllm":
        with pytest.raises(RequestRefused, match="coder@1 is an adapter, and this engine serves full weights"):
            run(full_sampler.publish(PolicyRef("coder", 1), reference.weights["coder"], LORA))
    for version in (1, 2):
        model = tuned(reference, version)
        ref, weights = PolicyRef("alone", version), parameters(model)
        assert run(full_sampler.publish(ref, weights)) == fingerprint(weights)
        answers = run(ask(full_sampler, ref, params()))
        assert gap(Reference(reference.folder, model, {}, {}), None, answers, 1.0) < 1e-4
        assert gap(reference, None, answers, 1.0) > 0.1
        assert run(full_sampler.info()).served[str(ref)] == fingerprint(weights)
    run(full_sampler.retire(PolicyRef("alone", 1)))
    with pytest.raises(RequestRefused, match="alone@1 is not served"):
        run(full_sampler.sample(PROMPTS[0], 1, params(), PolicyRef("alone", 1)))
    assert set(run(full_sampler.info()).served) == {"alone@2"}
    run(full_sampler.retire(PolicyRef("alone", 2)))


def test_incomplete_full_weights_are_refused(sampler: Sampler) -> None:
    with pytest.raises(SamplerError, match="missing"):
        run(sampler.publish(PolicyRef("part", 1), {"model.norm.weight": np.ones(64, np.float32)}))


def test_a_cancelled_request_makes_way(sampler: Sampler) -> None:
    async def scenario() -> list[Completion]:
        running = [asyncio.create_task(sampler.sample(PROMPTS[0], 11, endless(), BASE)) for _ in range(4)]
        await asyncio.sleep(0.05)
        for task in running:
            task.cancel()
        done = await asyncio.gather(*running, return_exceptions=True)
        assert [type(d) for d in done] == [asyncio.CancelledError] * 4
        return await asyncio.wait_for(sampler.sample(PROMPTS[0], 2, params(), BASE), 30)

    assert len(run(scenario())) == 2


def test_a_request_past_its_timeout_fails_and_others_go_on(sampler: Sampler) -> None:
    async def scenario() -> list[Completion]:
        late = sampler.sample(PROMPTS[0], 8, endless(timeout=0.05), BASE)
        other = asyncio.create_task(sampler.sample(PROMPTS[0], 2, params(), BASE))
        with pytest.raises(SampleTimeout, match=r"within 0\.05 s"):
            await late
        return await other

    assert len(run(scenario())) == 2


def test_requests_from_several_loops_and_threads_at_once(sampler: Sampler, reference: Reference) -> None:
    answers: dict[int, Any] = {}

    def work(i: int) -> None:
        answers[i] = run(ask(sampler, PolicyRef("planner", 1), params(temperature=0.0), n=1))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [[reference.greedy("planner", p, 12)] for p in PROMPTS]
    assert [tokens(answers[i]) for i in range(4)] == [expected] * 4


@pytest.mark.parametrize("name", NAMES)
def test_closing_fails_what_is_pending_and_may_be_repeated(
    name: str, reference: Reference, request: pytest.FixtureRequest
) -> None:
    sampler = closable(request, name, reference)
    policy = PolicyRef("alone", 3) if name == "vllm-ray" else BASE

    async def scenario() -> None:
        # More rows than an engine decodes at once: the last request waits, however late the close comes.
        pending = [asyncio.create_task(sampler.sample(PROMPTS[0], 8, endless(), policy)) for _ in range(40)]
        await asyncio.sleep(0)
        await sampler.aclose()
        *_, last = await asyncio.gather(*pending, return_exceptions=True)
        assert isinstance(last, SamplerError)
        assert "closed" in str(last)
        with pytest.raises(SamplerError, match="closed"):
            await sampler.sample(PROMPTS[0], 1, params(), policy)
        await sampler.aclose()

    run(scenario())


def closable(request: pytest.FixtureRequest, name: str, reference: Reference) -> Sampler:
    """A sampler that no later test needs: the engine for full weights, and another client of the server."""
    if name == "vllm-ray":
        full = request.getfixturevalue("vllm_full")
        run(full.publish(PolicyRef("alone", 3), parameters(tuned(reference, 3))))
        return full
    if name == "vllm-url":
        url = request.getfixturevalue("vllm_url")
        return run(client_of(url, reference.folder))
    return open_sampler(request, name, reference)
