"""An export served by its real sampler: hashes, outputs, and the two clients that applications use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from cotune.adapters.export import TrainedPolicy
from cotune.adapters.serving import Endpoint, serving
from cotune.integrations.models.chat import grammar
from cotune.sampling.protocol import fingerprint

pytestmark = pytest.mark.slow

ASKED = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def tokenizers_read() -> Iterator[list[Any]]:
    """The tokenizers that were read for grammars, which stops all Python code of the process meanwhile."""
    read: list[Any] = []
    plain = grammar._open

    def counted(tokenizer: Any, vocabulary: int) -> Any:
        read.append(tokenizer)
        return plain(tokenizer, vocabulary)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar, "_open", counted)
        yield read


@pytest.fixture(scope="module")
def endpoint(export: Path, tokenizers_read: list[Any]) -> Iterator[Endpoint]:
    with serving(export) as running:
        assert len(tokenizers_read) == 1  # before the first request
        yield running


@pytest.fixture(scope="module")
def client(endpoint: Endpoint) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=endpoint.url, api_key="unused", max_retries=0) as made:
        yield made


def greedy(model: Any, base: Path, tokens: int) -> tuple[list[int], list[float]]:
    """The tokens that a model says to ASKED, and their log-probabilities, one forward pass per token."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    ids = tokenizer.encode(tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, tokenize=False))
    said: list[int] = []
    logprobs: list[float] = []
    for _ in range(tokens):
        with torch.no_grad():
            last = model(torch.tensor([ids + said])).logits[0, -1].log_softmax(-1)
        said.append(int(last.argmax()))
        logprobs.append(float(last.max()))
        if said[-1] == tokenizer.eos_token_id:
            break
    return said, logprobs


def test_what_is_served_is_what_was_trained(
    client: openai.OpenAI, base: Path, export: Path, policies: list[TrainedPolicy]
) -> None:
    models = {model.id: model for model in client.models.list()}
    plain, _ = greedy(AutoModelForCausalLM.from_pretrained(base), base, 12)
    for policy in policies:
        assert models[policy.name].fingerprint == fingerprint(policy.weights)
        trained = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), export / policy.name)
        expected, logprobs = greedy(trained, base, 12)
        answer = client.chat.completions.create(
            model=policy.name,
            messages=ASKED,
            temperature=0,
            max_tokens=12,
            logprobs=True,
            extra_body={"return_token_ids": True},
        )
        assert answer.choices[0].token_ids == expected
        assert answer.choices[0].token_ids != plain
        sampled = [token.logprob for token in answer.choices[0].logprobs.content]
        assert sampled == pytest.approx(logprobs, abs=1e-3)


def test_a_seed_repeats_an_answer_and_a_stream_says_the_same(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"model": "planner", "messages": ASKED, "max_tokens": 8, "seed": 7, "temperature": 1.0}
    first = client.chat.completions.create(**settings).choices[0].message.content
    again = client.chat.completions.create(**settings).choices[0].message.content
    streamed = "".join(
        choice.delta.content or ""
        for chunk in client.chat.completions.create(**settings, stream=True)
        for choice in chunk.choices
    )
    assert first == again == streamed


def test_chat_openai_invokes_streams_and_counts(endpoint: Endpoint) -> None:
    model = ChatOpenAI(base_url=endpoint.url, api_key="unused", model="writer", max_tokens=6, temperature=0)
    asked = [SystemMessage("brief"), HumanMessage("hello")]
    answer = model.invoke(asked)
    assert answer.response_metadata["model_name"] == "writer"
    assert answer.usage_metadata["output_tokens"] <= 6
    parts = list(model.stream(asked))
    assert "".join(str(part.content) for part in parts) == answer.content


def test_no_request_waits_for_a_tokenizer_that_is_read_for_another(
    client: openai.OpenAI, tokenizers_read: list[Any]
) -> None:
    asked: dict[str, Any] = {"model": "writer", "messages": ASKED, "max_tokens": 4}
    told = client.chat.completions.create(**asked, logprobs=True).choices[0].logprobs
    assert told is not None
    client.chat.completions.create(**asked, response_format={"type": "json_object"})
    assert len(tokenizers_read) == 1


def test_a_prompt_longer_than_the_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="the model takes 512"):
        client.chat.completions.create(model="writer", messages=[{"role": "user", "content": "x" * 600}])


def test_health(endpoint: Endpoint) -> None:
    assert httpx.get(endpoint.url.replace("/v1", "/health")).json()["status"] == "ok"
