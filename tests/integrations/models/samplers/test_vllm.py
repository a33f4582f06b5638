"""What is inside vLLM's engines: versions that come and go, caches, aborted requests, log-probabilities at scale."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from transformers import Qwen3ForCausalLM

from cotune.errors import ConfigError, RequestRefused, SamplerError
from cotune.integrations import versions
from cotune.integrations.cluster.sampler import RaySampler
from cotune.integrations.models.vllm.adapters import SHARED_MEMORY, SharedFolders
from cotune.integrations.models.vllm.engine import VllmSampler, adapter_slots
from cotune.integrations.models.vllm.http import VllmHttpSampler
from cotune.integrations.versions import UnsupportedVersion
from cotune.records.policies import LoraSpec
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import Completion, Sampler, Weights
from tests.integrations.models.samplers.test_contract import (
    BASE,
    LORA,
    PROMPTS,
    Reference,
    lora_model,
    params,
    peft_weights,
    run,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ENGINES = ["vllm_by_url", "vllm_in_ray"]


@pytest.fixture(scope="module")
def roles(contract_model: Path) -> Reference:
    models = {name: lora_model(contract_model, seed) for seed, name in enumerate(("writer", "critic"), start=7)}
    base = Qwen3ForCausalLM.from_pretrained(contract_model).eval()
    return Reference(contract_model, base, models, {name: peft_weights(model) for name, model in models.items()})


def gaps(roles: Reference, name: str, prompt: list[int], candidates: list[Completion]) -> Any:
    plain = [roles.logprobs(name, prompt, c.token_ids, 1.0) for c in candidates]
    return np.abs(np.concatenate(plain) - np.concatenate([c.logprobs for c in candidates]))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_thousand_logprobs_of_two_adapters_equal_those_of_plain_peft(
    engine: str, roles: Reference, request: pytest.FixtureRequest
) -> None:
    sampler: Sampler = request.getfixturevalue(engine)

    async def scenario() -> Any:
        for name, weights in roles.weights.items():
            await sampler.publish(PolicyRef(name, 1), weights, LORA)
        jobs = [(name, prompt) for name in roles.weights for prompt in PROMPTS]
        how = params(max_tokens=40)
        drawn = await asyncio.gather(*(sampler.sample(p, 5, how, PolicyRef(name, 1)) for name, p in jobs))
        for name in roles.weights:
            await sampler.retire(PolicyRef(name, 1))
        return np.concatenate([gaps(roles, *job, candidates) for job, candidates in zip(jobs, drawn, strict=True)])

    gap = run(scenario())
    assert len(gap) >= 1000
    assert gap.mean() < 1e-4
    assert gap.max() < 1e-2


def test_a_retired_adapter_leaves_the_engine_and_the_memory_once_its_requests_have_ended(
    vllm_in_ray: Sampler, roles: Reference
) -> None:
    ref = PolicyRef("writer", 2)

    async def scenario() -> None:
        before = (await vllm_in_ray.info()).counters["adapters"]
        await vllm_in_ray.publish(ref, roles.weights["writer"], LORA)
        assert (await vllm_in_ray.info()).counters["adapters"] == before + 1
        assert folders("writer@2")
        running = asyncio.create_task(vllm_in_ray.sample(PROMPTS[0], 4, params(max_tokens=300), ref))
        await asyncio.sleep(0)
        await vllm_in_ray.info()
        await vllm_in_ray.retire(ref)
        if not running.done():
            assert (await vllm_in_ray.info()).counters["adapters"] == before + 1
        await running
        while (await vllm_in_ray.info()).counters["adapters"] > before:
            await asyncio.sleep(0.05)
        assert not folders("writer@2")

    run(asyncio.wait_for(scenario(), 120))


def test_what_watches_imports_for_applications_is_not_in_the_engines_processes(vllm_in_ray: Sampler) -> None:
    assert run(vllm_in_ray.info()).counters["finders"] == 0


def folders(name: str) -> list[Path]:
    return list(SHARED_MEMORY.glob(f"cotune-weights-*/{name}_*"))


def test_a_version_that_comes_back_with_other_weights_meets_no_old_cache(
    vllm_in_ray: Sampler, roles: Reference
) -> None:
    ref, prompt = PolicyRef("again", 1), [1, *range(20, 120)]

    async def scenario(name: str) -> Any:
        await vllm_in_ray.publish(ref, roles.weights[name], LORA)
        candidates = await vllm_in_ray.sample(prompt, 3, params(), ref)
        await vllm_in_ray.retire(ref)
        return gaps(roles, name, prompt, candidates)

    for name in roles.weights:
        assert run(scenario(name)).max() < 1e-4


def test_a_cancelled_or_late_request_is_aborted_in_the_engine(vllm_in_ray: Sampler) -> None:
    async def scenario() -> int:
        how = params(max_tokens=450)
        tasks = [asyncio.create_task(vllm_in_ray.sample(PROMPTS[0], 8, how, BASE)) for _ in range(3)]
        late = asyncio.create_task(vllm_in_ray.sample(PROMPTS[1], 8, params(max_tokens=450, timeout=0.3), BASE))
        while (await vllm_in_ray.info()).counters["requests"] < 12:  # not all of them: an answer may end early
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, late, return_exceptions=True)
        await vllm_in_ray.sample(PROMPTS[0], 1, params(max_tokens=5), BASE)
        return (await vllm_in_ray.info()).counters["requests"]

    assert run(asyncio.wait_for(scenario(), 120)) <= 1


def test_an_engine_that_sleeps_answers_when_it_wakes_as_before(vllm_in_ray: RaySampler, roles: Reference) -> None:
    ref, greedy = PolicyRef("sleeper", 1), params(temperature=0.0)

    async def answers() -> list[list[Completion]]:
        return [await vllm_in_ray.sample(PROMPTS[0], 1, greedy, policy) for policy in (BASE, ref)]

    async def scenario() -> None:
        await vllm_in_ray.publish(ref, roles.weights["writer"], LORA)
        before = await answers()
        await vllm_in_ray.sleep()
        await vllm_in_ray.sleep()
        served = (await vllm_in_ray.info()).served
        asked = asyncio.create_task(answers())
        await asyncio.sleep(0.5)
        assert not asked.done() and str(ref) in served
        await vllm_in_ray.wake()
        await vllm_in_ray.wake()
        assert await asked == before
        await vllm_in_ray.retire(ref)

    run(asyncio.wait_for(scenario(), 120))


def test_a_full_engine_refuses_by_name_and_waits_for_a_version_that_drains(
    vllm_in_ray: Sampler, roles: Reference
) -> None:
    weights = roles.weights["writer"]

    async def scenario() -> None:
        refs: list[PolicyRef] = []
        with pytest.raises(RequestRefused, match=rf"room for {adapter_slots(3, 1)} adapters, and serves .*many@1"):
            for version in range(1, adapter_slots(3, 1) + 2):
                await vllm_in_ray.publish(PolicyRef("many", version), weights, LORA)
                refs.append(PolicyRef("many", version))
        running = asyncio.create_task(vllm_in_ray.sample(PROMPTS[0], 4, params(max_tokens=200), refs[0]))
        await asyncio.sleep(0)
        await vllm_in_ray.info()
        await vllm_in_ray.retire(refs[0])
        await vllm_in_ray.publish(PolicyRef("many", 99), weights, LORA)
        assert running.done()
        for ref in [*refs[1:], PolicyRef("many", 99)]:
            await vllm_in_ray.retire(ref)

    run(asyncio.wait_for(scenario(), 120))


@pytest.mark.parametrize("engine", ENGINES)
def test_the_base_is_the_base_beside_adapters_in_a_full_engine(
    engine: str, roles: Reference, request: pytest.FixtureRequest
) -> None:
    sampler: Sampler = request.getfixturevalue(engine)
    many = [PolicyRef("filling", version) for version in range(1, adapter_slots(3, 1) + 1)]

    async def scenario() -> Any:
        for ref in many:
            await sampler.publish(ref, roles.weights["writer"], LORA)
        jobs = [sampler.sample(p, 3, params(), policy) for policy in (many[0], BASE) for p in PROMPTS]
        drawn = await asyncio.gather(*jobs)
        for ref in many:
            await sampler.retire(ref)
        return drawn[len(PROMPTS) :]

    for prompt, candidates in zip(PROMPTS, run(scenario()), strict=True):
        plain = [roles.logprobs(None, prompt, c.token_ids, 1.0) for c in candidates]
        assert np.abs(np.concatenate(plain) - np.concatenate([c.logprobs for c in candidates])).max() < 1e-4


@pytest.mark.parametrize("engine", ENGINES)
def test_neighbouring_seeds_share_no_candidate(engine: str, request: pytest.FixtureRequest) -> None:
    sampler: Sampler = request.getfixturevalue(engine)

    async def scenario() -> list[list[Completion]]:
        return list(await asyncio.gather(*(sampler.sample(PROMPTS[0], 4, params(seed=s), BASE) for s in (5, 6, 7))))

    drawn = [candidate.token_ids for candidates in run(scenario()) for candidate in candidates]
    assert len(set(drawn)) == 12


@pytest.mark.parametrize("engine", ENGINES)
def test_a_seed_holds_beside_requests_without_one(engine: str, request: pytest.FixtureRequest) -> None:
    sampler: Sampler = request.getfixturevalue(engine)

    async def drawn(others: int) -> list[Any]:
        crowd = [asyncio.create_task(sampler.sample(PROMPTS[1], 3, params(max_tokens=60), BASE)) for _ in range(others)]
        await asyncio.sleep(0.05)
        candidates = await sampler.sample(PROMPTS[0], 4, params(seed=3), BASE)
        await asyncio.gather(*crowd)
        return [c.token_ids for c in candidates]

    assert run(drawn(0)) == run(drawn(3))


def test_an_adapter_of_a_higher_rank_is_refused_with_both(vllm_in_ray: Sampler, roles: Reference) -> None:
    with pytest.raises(RequestRefused, match=r"wide@1 has rank 64; the engine takes adapters of up to 8"):
        run(vllm_in_ray.publish(PolicyRef("wide", 1), roles.weights["writer"], LoraSpec(rank=64)))


def models_of(url: str) -> set[str]:
    with urllib.request.urlopen(f"{url}/v1/models") as answer:
        return {card["id"] for card in json.load(answer)["data"]}


def test_a_server_keeps_no_adapter_of_a_client_that_has_left(
    vllm_url: str, contract_model: Path, roles: Reference
) -> None:
    async def scenario(weights: Weights) -> None:
        before = models_of(vllm_url)
        clients = [await VllmHttpSampler.open(vllm_url, contract_model) for _ in range(2)]
        for client in clients:  # two runs may use one server: equal versions do not meet
            await client.publish(PolicyRef("guest", 1), weights, LORA)
            await client.publish(PolicyRef("guest", 2), weights, LORA)
            await client.retire(PolicyRef("guest", 1))
        assert len(models_of(vllm_url) - before) == 4  # with the base of each
        for client in clients:
            await client.aclose()
        assert models_of(vllm_url) == before

    run(scenario(roles.weights["critic"]))
    assert not folders("guest@2")


def test_a_server_of_another_model_is_refused(vllm_url: str, tmp_path: Path) -> None:
    from tests.integrations import tiny_models

    tiny_models.build("llama", tmp_path / "other")
    with pytest.raises(ConfigError, match=r"model = .*other"):
        run(VllmHttpSampler.open(vllm_url, tmp_path / "other"))


def test_another_version_of_vllm_is_refused(contract_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version", lambda _: "0.9.2")
    with pytest.raises(UnsupportedVersion, match=r"vllm 0\.9\.2 cannot be used: tested is 0\.28 to"):
        run(VllmSampler.open(contract_model))


def test_a_killed_engine_fails_its_requests_and_a_killed_actor_leaves_nothing(
    vllm_in_ray: Sampler, roles: Reference
) -> None:
    """The last test of the engine in Ray."""
    run(vllm_in_ray.publish(PolicyRef("orphan", 1), roles.weights["writer"], LORA))
    actor = psutil.Process(run(vllm_in_ray.info()).counters["pid"])
    family = [actor, *actor.children(recursive=True)]
    core = next(process for process in family if "EngineCore" in " ".join(process.cmdline()))

    async def scenario() -> None:
        pending = asyncio.create_task(vllm_in_ray.sample(PROMPTS[0], 8, params(max_tokens=480), BASE))
        await asyncio.sleep(0.1)
        os.kill(core.pid, signal.SIGKILL)
        for request in (pending, vllm_in_ray.sample(PROMPTS[0], 1, params(), BASE), vllm_in_ray.info()):
            with pytest.raises(SamplerError, match="engine is gone"):
                await request

    shared = {Path(m.path) for p in family for m in p.memory_maps() if m.path.startswith("/dev/shm/psm_")}
    assert shared
    run(asyncio.wait_for(scenario(), 120))
    os.kill(actor.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(family, timeout=60)
    assert alive == []
    assert len(folders("orphan@1")) == 1
    successor = SharedFolders()
    successor.make("next@1", 0)  # whoever comes next clears it away
    successor.close()
    assert folders("orphan@1") == []
    assert [path for path in shared if path.exists()] == []
    with pytest.raises(SamplerError, match="engine is gone"):
        run(vllm_in_ray.info())
