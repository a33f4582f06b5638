"""A model of 0.1M parameters that speaks in letters, and an application of two roles on the OpenAI SDK."""

from __future__ import annotations

import functools
import os
import string
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import openai

import cotune
from cotune.episodes.workflows import WorkflowFunction

TASKS = [{"id": letter, "letter": letter} for letter in "abc"]
_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<a>{% else %}<u>{% endif %}{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def build_base(folder: Path, *, context: int = 256, template: bool = True, seed: int = 0) -> Path:
    """Write the model and its tokenizer (one token per character)."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    marks = ["<pad>", "<end>", "<u>", "<a>"]
    letters = [*marks, *string.ascii_lowercase, *" .:"]
    inner = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token=" "))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<end>")
    tokenizer.add_special_tokens({"additional_special_tokens": marks[2:]})
    if template:
        tokenizer.chat_template = _TEMPLATE
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(letters),
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=context,
            eos_token_id=1,
            pad_token_id=0,
            tie_word_embeddings=True,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@functools.cache
def client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)


async def ask(role: str, text: str, **params: Any) -> str:
    """One chat request of `role`, to whatever OPENAI_BASE_URL names where nothing answers it before."""
    with cotune.role(role):
        reply = await client(os.environ["OPENAI_BASE_URL"]).chat.completions.create(
            model="m", messages=[{"role": "user", "content": text}], **{"max_tokens": 4, **params}
        )
    return reply.choices[0].message.content or ""


async def converse(task: Mapping[str, str]) -> dict[str, float]:
    """The first role hears the letter, the second what the first said; the reward is how often it says the letter."""
    heard = await ask("first", f"say {task['letter']}")
    said = await ask("second", f"after {heard}: {task['letter']}")
    return {"team": said.count(task["letter"]) / 4}


def letters(candidate: Any, call: Any, task: Mapping[str, str]) -> float:
    """Share of the letters a to h in a reply of at most four."""
    return sum(letter in "abcdefgh" for letter in candidate.text) / 4


def application(run: Callable[[Any], Any] = converse, **scorers: Callable[..., Any]) -> WorkflowFunction:
    """A workflow of its own around `run`, with these scorers by role."""

    async def solve(task: Any) -> Any:
        return await run(task)

    made = cotune.workflow(solve)
    for role, scorer in scorers.items():
        made.scorer(role)(scorer)
    return made
