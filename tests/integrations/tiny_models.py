"""Tiny models from scratch for the tests: no weights to download."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
TEMPLATE = """
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif -%}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per character (Latin-1), and the chat marks."""
    characters = [chr(i) for i in range(10, 256)]
    vocab = {token: i for i, token in enumerate([*SPECIAL, *MARKS, *characters])}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(SPECIAL)
    inner.add_tokens(MARKS)
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|pad|>")
    fast.chat_template = TEMPLATE
    return fast


def byte_tokenizer(size: int = 8192) -> PreTrainedTokenizerFast:
    """Byte-level BPE, as most models have it, with the chat marks."""
    from tokenizers import trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    chance = random.Random(0)
    words = ["".join(chance.choices("etaoinshrdlu", k=chance.randint(2, 9))) for _ in range(4000)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(MARKS), special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator([json.dumps({word: [word, 17, None, True]}) for word in words], trainer)
    inner.add_tokens(MARKS)
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|pad|>")
    fast.chat_template = TEMPLATE
    return fast


def build_bytes(folder: Path, *, hidden: int = 64, size: int = 8192) -> None:
    """Save a Qwen3 with a byte-level tokenizer into `folder`."""
    torch.manual_seed(0)
    tok = byte_tokenizer(size)
    changed = Qwen3Config(
        **{**config("qwen3", len(tok)).to_dict(), "hidden_size": hidden, "intermediate_size": 2 * hidden}
    )
    Qwen3ForCausalLM(changed).eval().save_pretrained(folder)
    tok.save_pretrained(folder)


def config(architecture: str, vocabulary: int) -> object:
    shape = {
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "initializer_range": 0.15,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    if architecture == "qwen3":
        return Qwen3Config(**shape, tie_word_embeddings=True)
    if architecture == "llama":
        return LlamaConfig(**shape, tie_word_embeddings=False)
    if architecture == "qwen3-sliding":
        kinds = ["sliding_attention", "full_attention"]
        return Qwen3Config(**shape, use_sliding_window=True, sliding_window=8, layer_types=kinds)
    if architecture == "gemma3":
        kinds = ["sliding_attention", "full_attention"]
        return Gemma3TextConfig(**shape, sliding_window=8, layer_types=kinds)
    if architecture == "mamba":
        return MambaConfig(vocab_size=vocabulary, hidden_size=64, num_hidden_layers=2, state_size=8, eos_token_id=2)
    if architecture == "bloom":
        return BloomConfig(
            vocab_size=vocabulary, hidden_size=64, n_layer=2, n_head=4, initializer_range=0.15, eos_token_id=2
        )
    return GPT2Config(
        vocab_size=vocabulary,
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=512,
        initializer_range=0.15,
        eos_token_id=2,
        bos_token_id=2,
    )


PADDING = 60
"""How many more logits than tokens the model of the samplers' contract has."""


def build(architecture: str, folder: Path, seed: int = 0, padding: int = 0) -> PreTrainedModel:
    """Build a model, save it with its tokenizer into `folder`, and return it.

    It has `padding` more logits than the tokenizer has tokens.
    """
    torch.manual_seed(seed)
    tok = tokenizer()
    others = {"bloom": BloomForCausalLM, "gpt2": GPT2LMHeadModel, "llama": LlamaForCausalLM}
    kind = others.get(architecture, Qwen3ForCausalLM)
    model = kind(config(architecture, len(tok) + padding)).eval()
    model.save_pretrained(folder)
    tok.save_pretrained(folder)
    return model
