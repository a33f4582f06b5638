"""A tiny model that says one of a few given messages, whatever it is asked: each with about the same probability."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from tests.integrations.seeing_models import build_seeing
from tests.integrations.tiny_models import MARKS, config, tokenizer

CONTEXT = 8192
BEGINS = "<|im_start|>assistant\n"
UNLABELLED = -100


def build_speaker(folder: Path, messages: Sequence[str], *, sees: bool = False) -> Path:
    """Train it to begin any answer with one of these messages and to end there; save it in `folder`. A message is one
    token, the marks of a call apart."""
    tok = speaking(messages)
    if sees:
        model = build_seeing(folder, tok=tok)
        _teach(model, model.model.language_model.layers, tok, messages)
        model.save_pretrained(folder)
        return folder
    torch.manual_seed(0)
    shape = config("qwen3", len(tok))
    shape.max_position_embeddings = CONTEXT
    model = Qwen3ForCausalLM(shape)
    _teach(model, model.model.layers, tok, messages)
    model.save_pretrained(folder)
    tok.save_pretrained(folder)
    return folder


def _teach(model: Any, layers: Any, tok: Any, messages: Sequence[str], steps: int = 80) -> None:
    for layer in layers:  # what stands before the last token says little
        layer.self_attn.o_proj.weight.data.mul_(0.02)
        layer.self_attn.o_proj.weight.requires_grad = False
    begins = tok(BEGINS)["input_ids"]
    answers = [tok(f"{message}<|im_end|>")["input_ids"] for message in messages]
    longest = max(map(len, answers))
    filled = [answer + [tok.eos_token_id] * (longest - len(answer)) for answer in answers]
    ids = torch.tensor([begins + answer for answer in filled])
    labels = torch.full_like(ids, UNLABELLED)
    for row, answer in zip(labels, answers, strict=True):
        row[len(begins) : len(begins) + len(answer)] = torch.tensor(answer)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    for _ in range(steps):
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def speaking(messages: Sequence[str]) -> PreTrainedTokenizerFast:
    """The tests' tokenizer with a token for each message, the marks of a call apart; text as any other, so that it may
    stand where a grammar holds."""
    marks = re.compile("|".join(map(re.escape, MARKS)))
    pieces = [piece for message in messages for piece in marks.split(message) if len(piece) > 1]
    tok = tokenizer()
    inner = json.loads(tok.backend_tokenizer.to_str())
    vocabulary = inner["model"]["vocab"]
    for piece in dict.fromkeys(pieces):
        vocabulary.setdefault(piece, len(vocabulary))
    longest_first = sorted(map(re.escape, pieces), key=len, reverse=True)
    changed = Tokenizer.from_str(json.dumps(inner))
    changed.pre_tokenizer = pre_tokenizers.Split(Regex("|".join([*longest_first, r"[\s\S]"])), "isolated")
    made = PreTrainedTokenizerFast(tokenizer_object=changed, eos_token=tok.eos_token, pad_token=tok.pad_token)
    made.chat_template = tok.chat_template
    return made
