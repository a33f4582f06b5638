"""Builds the base model of the games: a small Qwen3 that knows their words and, mostly, the rules."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from examples.self_play import games
from examples.tiny_model import UNLABELLED, build_model, warm_up

TEMPLATE = (
    "{% for message in messages %}<|im_start|> {{ message['role'] }} {{ message['content'] }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)
Demonstration = tuple[list[dict[str, str]], str]

LEFT = {"row": 0.85, "column": 0.15}
"""How often the base chooses left: far from the equilibrium."""
MOVES, CHOICES = 6000, 400
ILLEGAL = 0.05
"""Share of the moves on the board that name any cell."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer over the words of the games, with a chat template."""
    words = {word: i for i, word in enumerate([*games.SPECIAL, *games.WORDS])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<|unk|>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(list(games.SPECIAL))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<|pad|>", unk_token="<|unk|>", eos_token="<|im_end|>"
    )
    fast.chat_template = TEMPLATE
    return fast


def demonstrations(rng: random.Random, moves: int = MOVES) -> Iterator[Demonstration]:
    """Choices by `LEFT`, and moves to a random cell of random positions, which is seldom not free."""
    for i in range(CHOICES):
        seat = ("row", "column")[i % 2]
        yield games.payoff_messages(seat), games.CHOICES[0 if rng.random() < LEFT[seat] else 1]
    for _ in range(moves):
        board = games.EMPTY
        for number in range(rng.randrange(9)):
            board = games.placed(board, rng.choice(games.free(board)), "xo"[number % 2])
        seat = "xo"[(9 - len(games.free(board))) % 2]
        cell = rng.choice(list(games.CELLS) if rng.random() < ILLEGAL else games.free(board))
        yield games.board_messages(board, seat), str(cell + 1)


def build(folder: Path, *, seed: int = 0, steps: int = 400, moves: int = MOVES) -> Path:
    """Build, warm up and save the base as a Hugging Face folder; the same for the same seed. Without `moves` on the
    board it knows the matrix game alone."""
    torch.set_num_threads(1)
    tokenizer, rng = build_tokenizer(), random.Random(f"games {seed}")
    rows = []
    for messages, answer in demonstrations(rng, moves):
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        said = [*tokenizer.convert_tokens_to_ids([answer]), tokenizer.eos_token_id]
        rows.append(([*prompt, *said], [UNLABELLED] * len(prompt) + said))
    model = build_model(tokenizer, seed)
    warm_up(model, rows, rng, steps=steps, batch=64, lr=3e-3, report=lambda step, loss: None)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
