"""A tiny model that says one of a few given messages, whatever it is asked: each with about the same probability."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import Qwen3ForCausalLM

from tests.integrations.tiny_models import config, tokenizer

CONTEXT = 8192
BEGINS = "<|im_start|>assistant\n"


def build_speaker(folder: Path, messages: Sequence[str], steps: int = 80) -> Path:
    """Train it to begin any answer with one of these messages, a token each, and to end there; save it in `folder`."""
    tok = tokenizer()
    tok.add_tokens([AddedToken(message, special=False, normalized=False) for message in messages])
    torch.manual_seed(0)
    shape = config("qwen3", len(tok))
    shape.max_position_embeddings = CONTEXT
    model = Qwen3ForCausalLM(shape)
    for layer in model.model.layers:  # what stands before the last token says little
        layer.self_attn.o_proj.weight.data.mul_(0.02)
        layer.self_attn.o_proj.weight.requires_grad = False
    ids = torch.tensor([tok(f"{BEGINS}{message}<|im_end|>")["input_ids"] for message in messages])
    labels = torch.full_like(ids, -100)
    labels[:, -2:] = ids[:, -2:]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    for _ in range(steps):
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(folder)
    tok.save_pretrained(folder)
    return folder
