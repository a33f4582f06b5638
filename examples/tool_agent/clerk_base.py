"""Builds a base model for the shop's agent: a small Qwen3 that has seen imperfect conversations with both tools.

Any Hugging Face model whose chat template knows tools would do as well; this takes a quarter of a minute.

    python -m examples.tool_agent.clerk_base --out runs/tool_agent/base --seed 0
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from transformers import PreTrainedTokenizerFast

from examples.tiny_model import UNLABELLED, Row, build_model, piece_tokenizer, warm_up
from examples.tool_agent.shop import PRICE_OF, SYSTEM, calculate, find, question

STEPS, BATCH, LR = 150, 16, 5e-3
CONVERSATIONS = 1500
ERRING = 0.2
"""Share of steps with a wrong answer of the demonstrated clerk."""
BROKEN = 0.1
"""Share of steps with a tool call that cannot be read."""

PIECES = ['{"name": "', '", "arguments": {"', '": "', '"}}', " * ", " + "]
"""Parts of tool calls that are one token each."""
TOOLS = {"search": "query", "calculator": "expression"}

TEMPLATE = (
    """
{%- if tools %}<|im_start|>tools
{% for t in tools %}{{ t.function.name }}({{ t.function.parameters.properties | join(' ') }}){% endfor %}<|im_end|>
{% endif -%}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] %}{% set f = call.function %}"""
    '<tool_call>{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}</tool_call>'
    """
{%- endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""
)

Message = dict[str, Any]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each word, number and piece of a tool call, and for each character that is in none of them."""
    texts = [
        SYSTEM,
        question(2, "x"),
        "costs nothing found",
        "system user assistant tool tools",
        *TOOLS,
        *TOOLS.values(),
    ]
    words = {word for text in [*texts, *PRICE_OF] for word in re.findall(r"[A-Za-z]{2,}", text)}
    whole = [*PIECES, *sorted(words, key=lambda word: (-len(word), word)), *(str(n) for n in range(99, 9, -1))]
    return piece_tokenizer(whole, TEMPLATE)


def conversation(rng: random.Random) -> list[Message]:
    """A customer served in three steps, with errors; a call that cannot be read ends it."""
    count, item = rng.randint(2, 9), rng.choice(sorted(PRICE_OF))
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question(count, item)}]
    searched = rng.choice(sorted(PRICE_OF)) if rng.random() < ERRING else item
    if not _step(rng, messages, "search", searched, find(searched)):
        return messages
    sign = "+" if rng.random() < ERRING else "*"
    expression = f"{count} {sign} {PRICE_OF[searched]}"
    if not _step(rng, messages, "calculator", expression, calculate(expression)):
        return messages
    final_answer = str(rng.randint(4, 81)) if rng.random() < ERRING else messages[-1]["content"]
    messages.append({"role": "assistant", "content": final_answer})
    return messages


def _step(rng: random.Random, messages: list[Message], tool: str, argument: str, result: str) -> bool:
    if rng.random() < BROKEN:
        text = json.dumps({"name": tool, "arguments": {TOOLS[tool]: argument}})[:-2]
        messages.append({"role": "assistant", "content": f"<tool_call>{text}</tool_call>"})
        return False
    call = {"type": "function", "function": {"name": tool, "arguments": {TOOLS[tool]: argument}}}
    messages += [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": result}]
    return True


def tool_schemas() -> list[dict[str, Any]]:
    """The tools as the application offers them, as far as the chat template reads them."""
    return [
        {"type": "function", "function": {"name": name, "parameters": {"properties": {argument: {}}}}}
        for name, argument in TOOLS.items()
    ]


def tokenized(tokenizer: PreTrainedTokenizerFast, messages: list[Message]) -> Row:
    """Ids of a conversation, with labels where the assistant speaks."""
    tools, ids, labels = tool_schemas(), [], []
    for end, message in enumerate(messages, 1):
        if message["role"] == "assistant":
            opened = tokenizer.apply_chat_template(
                messages[: end - 1], tools=tools, add_generation_prompt=True, tokenize=False
            )
            closed = tokenizer.apply_chat_template(messages[:end], tools=tools, tokenize=False).rstrip("\n")
            prompt, whole = (tokenizer.encode(text, add_special_tokens=False) for text in (opened, closed))
            labels += [UNLABELLED] * (len(prompt) - len(labels)) + whole[len(prompt) :]
            ids = whole
    return ids, labels


def build(folder: Path, *, seed: int = 0, steps: int = STEPS, count: int = CONVERSATIONS) -> list[float]:
    """Build, warm up and save a base model as a Hugging Face folder; the losses are the same for the same seed."""
    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed)
    rng = random.Random(f"conversations {seed}")
    pool = [tokenized(tokenizer, conversation(rng)) for _ in range(count)]
    losses: list[float] = []
    warm_up(model, pool, rng, steps=steps, batch=BATCH, lr=LR, report=lambda _, loss: losses.append(loss))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return losses


def main() -> None:
    """Build the base model."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    losses = build(options.out, seed=options.seed, steps=options.steps)
    print(f"base model saved in {options.out}, loss {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
