"""The base models of the examples: a Qwen3 small enough for one CPU core, its tokenizer, and its supervised warm-up."""

from __future__ import annotations

import argparse
import os
import random
import re
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL = ("<|pad|>", "<|unk|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Demonstration = tuple[list[dict[str, str]], str]
"""Messages, and their answer."""
Row = tuple[list[int], list[int]]
"""The token ids of a text, and its labels: the same ids, or -100 for tokens that are not learned."""
R = TypeVar("R")
UNLABELLED = -100
Words = Iterable[str] | PreTrainedTokenizerFast
"""The words of a vocabulary, a token each, or a tokenizer."""


def word_tokenizer(words: Iterable[str]) -> PreTrainedTokenizerFast:
    """A word-level tokenizer with a chat template: a token for each of `words` (chat roles too), after `SPECIAL`.

    A word may have spaces and lines in it, as a system prompt has: it is found wherever a text holds it.
    """
    vocabulary = dict.fromkeys([*SPECIAL, *words])
    phrases = sorted((word for word in vocabulary if re.search(r"\s", word)), key=len, reverse=True)
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<|unk|>"))
    split = Regex("|".join([*map(re.escape, phrases), r"\S+"]))
    inner.pre_tokenizer = pre_tokenizers.Split(split, "removed", invert=True)
    inner.add_special_tokens(list(SPECIAL))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<|pad|>", unk_token="<|unk|>", eos_token="<|im_end|>"
    )
    fast.chat_template = TEMPLATE
    return fast


CHAT_MARKS = ("<|pad|>", "<|im_start|>", "<|im_end|>")
CALL_MARKS = ("<tool_call>", "</tool_call>")
_REGEX_MARKS = str.maketrans({mark: f"\\{mark}" for mark in ".^$*+?{}[]\\|()#/-&~"})
"""Characters that are escaped in a pattern. `re.escape` also escapes line ends, in a way that this engine misreads."""


def piece_tokenizer(pieces: Sequence[str], template: str) -> PreTrainedTokenizerFast:
    """A tokenizer for tool calls: a token for each piece of text, for the marks around a call, and for each character
    that is in no piece. `template` is its chat template.

    Pieces are looked for in their order, so one that begins like another one must come before it if it is longer.
    """
    characters = [chr(number) for number in range(10, 127)]
    tokens = dict.fromkeys([*CHAT_MARKS, *CALL_MARKS, *pieces, *characters])
    inner = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token="?"))
    pattern = "|".join([*(piece.translate(_REGEX_MARKS) for piece in pieces), r"[\s\S]"])
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(list(CHAT_MARKS))
    inner.add_tokens(list(CALL_MARKS))
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|pad|>")
    fast.chat_template = template
    return fast


def byte_tokenizer(texts: Iterable[str], size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most `size` tokens, learned from `texts`, with a chat template: for any text,
    and in a form that GGUF files can hold."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<|pad|>", eos_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    return fast


def build_base(
    folder: Path,
    words: Words,
    demonstrations: Sequence[Demonstration],
    rng: random.Random,
    *,
    seed: int,
    steps: int,
    batch: int = 96,
    lr: float = 3e-3,
    report: Callable[[int, float], None] = lambda step, loss: None,
    **size: int,
) -> None:
    """Build, warm up and save a base model as a Hugging Face folder; the same for the same seed and demonstrations.
    `size` as in `build_model`."""
    torch.set_num_threads(1)
    tokenizer = words if isinstance(words, PreTrainedTokenizerFast) else word_tokenizer(words)
    model = build_model(tokenizer, seed, **size)
    warm_up(model, _tokenized(tokenizer, demonstrations), rng, steps=steps, batch=batch, lr=lr, report=report)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def base_builder(
    words: Callable[[], Words],
    demonstrations: Callable[[random.Random, int, int], Sequence[Demonstration]],
    *,
    name: str,
    steps: int,
    count: int,
    batch: int = 96,
) -> Callable[..., None]:
    """Return the `build` function of an example. `name` seeds its random numbers. `demonstrations` takes a random
    generator, a seed and a count; `steps` and `count` are defaults."""

    def build(
        folder: Path,
        *,
        seed: int = 0,
        steps: int = steps,
        count: int = count,
        report: Callable[[int, float], None] = lambda step, loss: None,
    ) -> None:
        """Build, warm up and save a base model as a Hugging Face folder; the same for the same seed."""
        rng = random.Random(f"{name} demonstrations {seed}")
        shown = demonstrations(rng, seed, count)
        build_base(folder, words(), shown, rng, seed=seed, steps=steps, batch=batch, report=report)

    return build


def build_by_command(build: Callable[..., None], steps: int) -> None:
    """The command line of a base model: `build` it in the folder `--out`, by default in so many steps of warm-up."""
    parser = argparse.ArgumentParser(description=build.__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=steps)
    options = parser.parse_args()
    started = time.monotonic()

    def report(step: int, loss: float) -> None:
        if step % 50 == 0 or step == options.steps:
            print(f"warm-up {step}/{options.steps}: loss {loss:.3f}, {time.monotonic() - started:.0f} s", flush=True)

    build(options.out, seed=options.seed, steps=options.steps, report=report)
    print(f"base model saved in {options.out}")


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int, **size: int) -> Qwen3ForCausalLM:
    """An untrained Qwen3 of 0.3M parameters, or of another `size`: fields of its configuration."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        **{"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, **size},
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


def padded(rows: Sequence[Row], pad: int) -> dict[str, torch.Tensor]:
    """Return the inputs of a model for rows: padded on the right, with labels."""
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([row + [pad] * (width - len(row)) for row, _ in rows])
    labels = torch.tensor([row + [UNLABELLED] * (width - len(row)) for _, row in rows])
    return {"input_ids": ids, "attention_mask": ids.ne(pad), "labels": labels}


def warm_up(
    model: Any,
    rows: Sequence[R],
    rng: random.Random,
    *,
    steps: int,
    batch: int,
    lr: float,
    report: Callable[[int, float], None],
    given: Callable[[Sequence[R], int], dict[str, torch.Tensor]] = padded,
) -> None:
    """Supervised training, each step on `batch` rows that `rng` draws; `report` is told each step and its loss. `given`
    makes what the model is given of rows and of the id that pads."""
    pad = model.config.pad_token_id
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    model.train()
    for number in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (number + 1) / 20) * (1 - number / steps)
        loss = model(**given(rng.sample(rows, min(batch, len(rows))), pad)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        report(number + 1, loss.item())
    model.eval()


def _tokenized(tokenizer: PreTrainedTokenizerFast, demonstrations: Sequence[Demonstration]) -> list[Row]:
    """The ids of each demonstration, with labels where the answer is."""
    texts = [tokenizer.apply_chat_template(m, tokenize=False, add_generation_prompt=True) for m, _ in demonstrations]
    prompts = tokenizer(texts)["input_ids"]
    answers = tokenizer([f"{answer}{tokenizer.eos_token}" for _, answer in demonstrations])["input_ids"]
    both = zip(prompts, answers, strict=True)
    return [(prompt + answer, [UNLABELLED] * len(prompt) + answer) for prompt, answer in both]
