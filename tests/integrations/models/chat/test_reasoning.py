"""Models that think: their replies split, given back and trained on as sampled, under three families' templates.

The templates are minimal ones that treat reasoning as those of Qwen3, DeepSeek-R1 and SmolLM3 do.
"""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from cotune.episodes.episode import run_episode
from cotune.episodes.workflows import workflow, workflow_of
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.records.structs import PolicyRef, Task
from cotune.sampling.protocol import Completion
from cotune.sampling.responder import PolicyResponder
from tests.integrations import tiny_models
from tests.integrations.recorded import Sink

TURN = "{%- if add_generation_prompt %}<|im_start|>assistant\n"
QWEN3 = """{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == "user" %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == "assistant" and loop.index0 > ns.last and m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}<|im_end|>
{% endfor -%}"""
"""Reasoning is shown after the last user message only; the model opens it itself."""
THINKING = f"{QWEN3}{TURN}<think>\n{{% endif %}}"
"""The same, opened in the prompt, as Qwen3's thinking models have it."""
NOT_THINKING = f"{QWEN3}{TURN}<think>\n\n</think>\n\n{{% endif %}}"
"""With `enable_thinking=false`."""
QWEN3 += f"{TURN}{{% endif %}}"
R1 = """{%- for m in messages %}{% if m.role == "assistant" -%}
<|im_start|>assistant
{{ m.content.split("</think>")[-1] }}<|im_end|>
{%- else %}<|im_start|>user
{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""
"""Reasoning is opened in the prompt and cut out of every earlier reply."""
SMOLLM3 = (
    """{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor -%}"""
    + f"{TURN}{{% endif %}}"
)
"""Earlier replies are shown as their content; the model opens its reasoning itself."""
USER = {"role": "user", "content": "add"}


def made(template: str) -> ChatTemplate:
    tokenizer = tiny_models.tokenizer()
    tokenizer.add_tokens(["nk", "an", "42"])  # a text has several spellings in ids
    tokenizer.chat_template = template
    return ChatTemplate(tokenizer, [2])


def odd(chat: ChatTemplate, text: str) -> tuple[int, ...]:
    """Ids of a text as no tokenizer would choose them: character by character, but for the marks."""
    pieces = text.replace("<", "\0<").replace(">", ">\0").split("\0")
    parts = [part for piece in pieces for part in ([piece] if piece.startswith("<") else piece)]
    return tuple(i for part in parts for i in chat.tokenizer.encode(part, add_special_tokens=False))


@pytest.mark.parametrize(
    ("template", "reply", "reasoning"),
    [
        (QWEN3, "<think>\nI thank", "I thank"),
        (QWEN3, "<think>\n", None),
        (THINKING, "I thank", "I thank"),
        (R1, "I thank", "I thank"),
        (R1, '<tool_call>{"name": "go"}</tool_call> would', '<tool_call>{"name": "go"}</tool_call> would'),
        (SMOLLM3, "<think>I thank", "I thank"),
    ],
)
def test_a_reply_that_ends_within_its_reasoning_has_no_content(
    template: str, reply: str, reasoning: str | None
) -> None:
    chat = made(template)
    prompt = chat.render([USER], None)
    text, message, finish = chat.parse(odd(chat, reply), prompt=prompt)
    assert text == reply
    expected = {"role": "assistant", "content": ""}
    assert message == (expected | {"reasoning_content": reasoning} if reasoning else expected)
    assert finish == "stop"


@pytest.mark.parametrize(
    ("template", "reply", "content"),
    [
        (QWEN3, "42", "42"),
        (NOT_THINKING, "42", "42"),
        (SMOLLM3, "42", "42"),
        (R1, "I thank\n</think>\n\n42", "42"),
        (THINKING, "I thank\n</think>\n\n42", "42"),
        (THINKING, "<think>I thank\n</think>\n\n42", "42"),
    ],
)
def test_what_follows_the_reasoning_is_the_content(template: str, reply: str, content: str) -> None:
    chat = made(template)
    _, message, _ = chat.parse([*odd(chat, reply), 2], prompt=chat.render([USER], None))
    assert message["content"] == content
    assert message.get("reasoning_content") == ("I thank" if "thank" in reply else None)


def test_a_mark_that_the_user_writes_opens_no_reasoning() -> None:
    chat = made(QWEN3)
    prompt = chat.render([{"role": "user", "content": "what is <think>"}], None)
    assert chat.parse(odd(chat, "42"), prompt=prompt)[1] == {"role": "assistant", "content": "42"}


class Scripted:
    def __init__(self, chat: ChatTemplate, replies: list[str]) -> None:
        self.drawn = [(*odd(chat, reply), 2) for reply in replies]
        self.prompts: list[tuple[int, ...]] = []

    async def sample(self, prompt: Any, n: int, params: Any, policy: PolicyRef) -> list[Completion]:
        self.prompts.append(tuple(prompt))
        drawn = self.drawn[len(self.prompts) - 1]
        return [Completion(drawn, (-0.5,) * len(drawn), "stop")]


CASES = {
    "qwen3": (QWEN3, "<think>\nI thank\n</think>\n\n42"),
    "qwen3-thinking": (THINKING, "I thank\n</think>\n\n42"),
    "r1": (R1, "I thank\n</think>\n\n42"),
    "smollm3": (SMOLLM3, "<think>\nI thank\n</think>\n42"),
}


@pytest.mark.parametrize("then", ["user", "tool"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("nowhere")
def test_what_is_trained_on_is_what_was_sampled_after_the_prompt_that_the_template_gives(name: str, then: str) -> None:
    """Two turns; the application sends reasoning back as it got it."""
    template, reply = CASES[name]
    chat = made(template)
    sampler, sink = Scripted(chat, [reply, reply]), Sink()
    given: list[Any] = []

    def solve(task: Any) -> int:
        with openai.OpenAI(max_retries=0) as client:
            said = client.chat.completions.create(model="m", messages=[USER]).choices[0].message
            given.append(said.model_dump(exclude_none=True))
            client.chat.completions.create(model="m", messages=[USER, given[0], {"role": then, "content": "on"}])
        return 1

    responder = PolicyResponder(sampler, chat, {"app": PolicyRef("p", 1)})  # type: ignore[arg-type]
    outcome = asyncio.run(
        run_episode(workflow_of(workflow(solve)), Task(id="t", input={}), sink=sink, responder=responder)
    )
    assert outcome.error is None
    assert given == [{"role": "assistant", "content": "42", "reasoning_content": "I thank"}]
    calls = sink.calls()
    assert [call.candidates[0].token_ids for call in calls] == sampler.drawn
    first, second = sampler.prompts
    text = chat.tokenizer.decode(list(second))
    keeps = name.startswith("qwen3") and then == "tool"
    assert text.count("I thank") == int(keeps)
    assert text.startswith("<|im_start|>user\nadd")
    assert "42" in text
    whole = first + sampler.drawn[0]
    assert (second[: len(whole)] == whole) == keeps
    if not keeps:
        assert list(second) == chat.tokenizer.encode(text, add_special_tokens=False)


def test_a_stream_gives_the_reasoning_back_too() -> None:
    from cotune.integrations.apps.openai.completions import to_stream
    from cotune.integrations.apps.openai.forms import CHAT, body_of_stream

    message = {"role": "assistant", "content": "42", "reasoning_content": "I thank"}
    choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
    raw = to_stream({"id": "1", "created": 1, "model": "m", "choices": choices}, {})
    assert b'"reasoning_content":"I thank"' in raw
    found = body_of_stream(CHAT, raw)
    assert found is not None
    assert found["choices"][0]["message"] == message
