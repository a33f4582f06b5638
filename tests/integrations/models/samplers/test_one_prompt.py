"""The prompts of an application are the same token ids wherever its policies answer: evaluated, deployed or served."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

import cotune
from cotune.adapters.export import Origin, TrainedPolicy, write_export
from cotune.adapters.serving import serving
from cotune.episodes.rollout import EpisodeBatch
from cotune.episodes.workflows import workflow_of
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.integrations.models.transformers.sampler import TransformersSampler
from cotune.recording.recorder import Nowhere
from cotune.records.structs import PolicyRef
from cotune.records.tasks import as_tasks
from cotune.sampling.protocol import UNSHAPED, Completion, Sampler, SamplingParams
from cotune.sampling.responder import PolicyResponder
from cotune.trainer.evaluation.run import evaluate_episodes
from tests.integrations import talker
from tests.integrations.tiny_models import PADDING

pytestmark = pytest.mark.slow

EPISODES = 50
Prompts = list[tuple[int, ...]]


async def errand(number: int) -> int:
    """The application: one agent with a tool, over two messages of its user; how many tools were called."""
    messages: list[Any] = [{"role": "user", "content": f"go {number}"}]
    called = 0
    async with openai.AsyncOpenAI(max_retries=0, timeout=600) as client:  # by itself 5 s to connect
        for turn in range(3):
            answer = await client.chat.completions.create(
                model="walker", messages=messages, tools=talker.TOOLS, temperature=0, max_tokens=80
            )
            said = answer.choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            for call in said.tool_calls or ():
                called += 1
                messages.append({"role": "tool", "tool_call_id": call.id, "content": f"at {number % 7}"})
            if not said.tool_calls:
                messages.append({"role": "user", "content": f"go {number + turn}"})
    return called


async def errands() -> int:
    """All of them at once; how many tools were called."""
    return sum(await asyncio.gather(*(errand(i) for i in range(EPISODES))))


@cotune.workflow
async def recorded(task: Any) -> float:
    with cotune.role("walker"):
        return float(await errand(task["number"]))


class Watched:
    """A sampler that keeps the prompts that it is asked for."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.prompts: Prompts = []

    async def sample(
        self, prompt_token_ids: Sequence[int], n: int, params: SamplingParams, policy: PolicyRef
    ) -> list[Completion]:
        self.prompts.append(tuple(prompt_token_ids))
        return await self.sampler.sample(prompt_token_ids, n, params, policy)


def evaluated(sampler: Any, model: Path, policy: PolicyRef) -> tuple[Prompts, float]:
    """Prompts of an evaluation, and the tools called."""
    watched = Watched(sampler)
    override = {"temperature": 0.0, **UNSHAPED}
    responder = PolicyResponder(watched, ChatTemplate.load(model), {"walker": policy}, override=override)  # type: ignore[arg-type]
    batch = EpisodeBatch(tasks=as_tasks([{"number": i} for i in range(EPISODES)]), sink=Nowhere(), phase="eval")
    found = asyncio.run(evaluate_episodes(workflow_of(recorded), batch, responder, label="trained"))
    assert not found.failed
    assert found.reward is not None
    return sorted(watched.prompts), round(found.reward.mean * EPISODES)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("talker") / "model"
    talker.teach(folder)
    return folder


@pytest.fixture(scope="module")
def reference(model: Path, in_thread: None) -> Prompts:
    """The prompts under `eval`."""

    async def opened() -> TransformersSampler:
        return await TransformersSampler.open(model)

    sampler = asyncio.run(opened())
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OPENAI_API_KEY", "none")
            patch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
            prompts, called = evaluated(sampler, model, PolicyRef("base", 0))
    finally:
        asyncio.run(sampler.aclose())
    assert len(prompts) == 3 * EPISODES
    assert called >= EPISODES
    decode = ChatTemplate.load(model).tokenizer.decode
    assert sum('"arguments":{' in decode(list(ids)) for ids in prompts) > EPISODES, "spelled as the model does"
    return prompts


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Prompts]:
    """Every prompt that any in-process sampler is asked for."""
    prompts: Prompts = []
    sample = TransformersSampler.sample

    async def watched(self: Any, prompt_token_ids: Sequence[int], *rest: Any, **options: Any) -> list[Completion]:
        prompts.append(tuple(prompt_token_ids))
        return await sample(self, prompt_token_ids, *rest, **options)

    monkeypatch.setattr(TransformersSampler, "sample", watched)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    yield prompts


def test_deployed_prompts_are_those_of_an_evaluation(
    model: Path, reference: Prompts, sampled: Prompts, nowhere: None, tmp_path: Path
) -> None:
    frozen = TrainedPolicy(name="walker", kind="frozen", version=0, roles=("walker",), model=str(model))
    write_export(tmp_path / "export", [frozen], origin=Origin(run="r"))

    async def run() -> None:
        with cotune.role("walker"):
            await errands()

    with cotune.deployed(tmp_path / "export"):
        asyncio.run(run())
    assert sorted(sampled) == reference


def test_served_prompts_are_those_of_an_evaluation(
    model: Path, reference: Prompts, sampled: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(model, names=["walker"]) as endpoint:
        monkeypatch.setenv("OPENAI_BASE_URL", endpoint.url)
        asyncio.run(errands())
    assert sorted(sampled) == reference


def test_prompts_with_vllm_are_those_of_the_sampler_in_process(
    model: Path, reference: Prompts, vllm_full: Sampler, nowhere: None
) -> None:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model)
    weights = {name: np.asarray(tensor.detach()) for name, tensor in loaded.named_parameters()}
    for name, array in weights.items():
        if array.shape[0] == loaded.config.vocab_size:  # the engine's model has a padded vocabulary
            weights[name] = np.pad(array, [(0, PADDING), (0, 0)])
    taught = PolicyRef("talker", 1)
    asyncio.run(vllm_full.publish(taught, weights))
    prompts, _ = evaluated(vllm_full, model, taught)
    asyncio.run(vllm_full.retire(taught))
    assert prompts == reference
