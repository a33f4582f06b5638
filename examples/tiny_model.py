"""The base models of the examples: a Qwen3 small enough for one CPU core, and its supervised warm-up."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

Row = tuple[list[int], list[int]]
"""The token ids of a text, and the same as labels: -100 where nothing is to be learned."""
UNLABELLED = -100


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """An untrained Qwen3 of 0.3M parameters."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.08,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def warm_up(
    model: Qwen3ForCausalLM,
    rows: Sequence[Row],
    rng: random.Random,
    *,
    steps: int,
    batch: int,
    lr: float,
    report: Callable[[int, float], None],
) -> None:
    """Supervised training, each step on `batch` rows that `rng` draws; `report` is told each step and its loss."""
    pad = model.config.pad_token_id
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    model.train()
    for number in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (number + 1) / 20) * (1 - number / steps)
        ids, labels = _padded(rng.sample(rows, min(batch, len(rows))), pad)
        loss = model(input_ids=ids, attention_mask=ids.ne(pad), labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        report(number + 1, loss.item())
    model.eval()


def _padded(rows: Sequence[Row], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([row + [pad] * (width - len(row)) for row, _ in rows])
    labels = torch.tensor([row + [UNLABELLED] * (width - len(row)) for _, row in rows])
    return ids, labels
