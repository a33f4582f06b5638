"""A tiny model that calls tools in its own spelling: the contract model's shape, taught a few conversations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.integrations import tiny_models

TOOLS = [{"type": "function", "function": {"name": "go", "parameters": {}}}]
STEPS = 45


def teach(folder: Path) -> None:
    """Save a model whose replies call `go` with other spaces in their JSON than the template's, or say a few words."""
    torch.manual_seed(0)
    tokenizer = tiny_models.tokenizer()
    model = tiny_models.build("qwen3", folder)
    taught = [_lesson(tokenizer, number) for number in range(8)]
    length = max(len(ids) for ids, _ in taught)
    ids = torch.zeros(len(taught), length, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for row, (tokens, mask) in enumerate(taught):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        labels[row, : len(tokens)] = torch.where(torch.tensor(mask), torch.tensor(tokens), -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=STEPS)
    model.train()
    for _ in range(STEPS):
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval().save_pretrained(folder)


def _lesson(tokenizer: Any, number: int) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation, and which of them the model says."""
    asked = [{"role": "user", "content": f"go {number}"}]
    parts: Sequence[tuple[str, bool]] = (
        (tokenizer.apply_chat_template(asked, tools=TOOLS, add_generation_prompt=True, tokenize=False), False),
        (f'<tool_call>{{"name":"go",  "arguments":{{"to":{number % 4}}}}}</tool_call><|im_end|>', True),
        (f"\n<|im_start|>tool\nat {number % 4}<|im_end|>\n<|im_start|>assistant\n", False),
        (f' On. <tool_call>{{"arguments":{{"to":{number % 3}}},"name":"go"}}</tool_call><|im_end|>', True),
        (f"\n<|im_start|>tool\nat {number % 3}<|im_end|>\n<|im_start|>assistant\n", False),
        (f"There {number % 3} <|im_end|>", True),
    )
    ids, said = [], []
    for text, own in parts:
        found = tokenizer.encode(text, add_special_tokens=False)
        ids += found
        said += [own] * len(found)
    return ids, said
