"""Models with random weights, made on the device that they run on, and rows of random tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import cotune.trainer.learner.load as learner_load
from benchmarks.qwen3 import QWEN3, Shape, qwen3_config
from cotune.algorithms.samples import TrainRow

CONTEXT = 131_072
SHAPES = {**QWEN3, "tiny": Shape(64, 128, 2, 4, 2, vocabulary=512, head_width=32)}


def config_of(name: str) -> Qwen3Config:
    """The shape of a model of `SHAPES`."""
    shape = SHAPES[name]
    return qwen3_config(
        shape,
        max_position_embeddings=CONTEXT,
        max_window_layers=shape.layers,
        eos_token_id=0,
        pad_token_id=1,
    )


def build(name: str, dtype: torch.dtype, device: str, seed: int = 0) -> Qwen3ForCausalLM:
    """A model of `SHAPES` with random weights; the same for the same seed, device and precision."""
    torch.manual_seed(seed)
    with torch.device(device):
        network = Qwen3ForCausalLM._from_config(config_of(name), dtype=dtype)
    return network.eval()


@contextmanager
def made_on_the_device(folder: Path, name: str, seed: int = 0) -> Iterator[str]:
    """A model folder without weights: while it is open, learners that load it get random weights on their device."""
    config_of(name).save_pretrained(folder)
    load = learner_load._load

    def made(_: str, dtype: str, device: torch.device, settings: Any, *rest: Any, **more: Any) -> Any:
        if settings.quantize != "none":
            raise RuntimeError("Weights of 4 bits are read from files, and there are none.")
        return build(name, getattr(torch, dtype), str(device), seed)

    learner_load._load = made
    try:
        yield str(folder)
    finally:
        learner_load._load = load


def plain_rows(count: int, prompt: int, answer: int, vocabulary: int, seed: int = 0) -> list[TrainRow]:
    """Rows that have nothing in common."""
    draw = random.Random(seed)
    return [
        TrainRow(
            id=f"row {number}",
            role="agent",
            prompt_ids=tuple(draw.randrange(2, vocabulary) for _ in range(prompt)),
            response_ids=tuple(draw.randrange(2, vocabulary) for _ in range(answer)),
            logprobs=(-1.0,) * answer,
            advantage=1.0 if number % 2 else -1.0,
            trajectory=f"episode {number}",
        )
        for number in range(count)
    ]


def episode_rows(
    episodes: int, turns: int, candidates: int, prompt: int, answer: int, vocabulary: int, seed: int = 0
) -> list[TrainRow]:
    """Rows of a tree: each turn has `candidates` answers to one prompt, and its first answer is in the next prompt."""
    draw = random.Random(seed)
    rows: list[TrainRow] = []
    for episode in range(episodes):
        prompt_ids = tuple(draw.randrange(2, vocabulary) for _ in range(prompt))
        for turn in range(turns):
            answers = [tuple(draw.randrange(2, vocabulary) for _ in range(answer)) for _ in range(candidates)]
            for number, ids in enumerate(answers):
                rows.append(
                    TrainRow(
                        id=f"episode {episode}, turn {turn}, candidate {number}",
                        role="agent",
                        prompt_ids=prompt_ids,
                        response_ids=ids,
                        logprobs=(-1.0,) * answer,
                        advantage=1.0 if number % 2 else -1.0,
                        trajectory=f"episode {episode}",
                    )
                )
            prompt_ids = prompt_ids + answers[0] + tuple(draw.randrange(2, vocabulary) for _ in range(answer // 4))
    return rows
