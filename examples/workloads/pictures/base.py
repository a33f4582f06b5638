"""Builds a base model for grids of 4 by 4 that sees the pictures and, mostly, knows what each role is for: warmed up on
right descriptions and then on imperfect demonstrations.

    python -m examples.workloads.pictures.base --out runs/pictures/base --seed 0
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from transformers import (
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from examples.plan_path.base import scene
from examples.plan_path.grid import MOVES, Cell, Grid, carry_out, step
from examples.tiny_model import UNLABELLED, build_by_command, build_model, padded, warm_up, word_tokenizer
from examples.workloads.pictures.app import ALONE, DESCRIBER, SOLVER, told
from examples.workloads.pictures.board import Seen, drawn, said, truth

SIZE = 4
"""Of the grids that the model knows."""
STEPS, DEMONSTRATIONS = 280, 12000
BATCH, LR_SEEING, LR = 96, 5e-3, 2e-3
SEEING = 0.65
"""Share of both in which it learns to see, by right descriptions: errors would teach a model of this size nothing."""
ERRING_MOVE = 0.7
"""Share of moves that are random."""
ERRING_WAY, ERRING_WALL = 0.3, 0.2
"""Share of the numbers of a description that are random, and of the walls that are named wrongly or left out."""
BAD_FORMAT = 0.05
ROLES = ("describer", "agent", "solver", "agent")
"""Whose turn it is to be demonstrated."""
PIXELS, PATCH = 2 * SIZE, 2
"""Of a side: the picture as the model sees it, two for a cell, and what it makes a token of."""
MARK = "<image>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = (
    *(MARK, DESCRIBER, ALONE, SOLVER, "system", "user", "assistant", *MOVES, "goal", "walls", "none"),
    *(f"{move}={number}" for move in MOVES for number in range(SIZE)),
)
"""The words of the game, and each prompt, a token each."""


Demonstration = tuple[list[dict[str, Any]], str, bytes | None]
"""Messages, what is answered, and the picture in them."""


class Row(NamedTuple):
    """A demonstration: token ids, labels, and the picture in it, as pixel values [3, height, width]."""

    ids: list[int]
    labels: list[int]
    picture: torch.Tensor | None


def make_processor() -> LlavaProcessor:
    """What makes tokens of texts and pixel values of pictures."""
    words = word_tokenizer(WORDS)
    words.add_special_tokens({"additional_special_tokens": [MARK]})
    size = {"height": PIXELS, "width": PIXELS}
    sized = CLIPImageProcessorPil(size=size, crop_size=size, resample=Image.Resampling.BILINEAR)
    return LlavaProcessor(
        sized,
        words,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )


def make_model(words: PreTrainedTokenizerFast, seed: int) -> LlavaForConditionalGeneration:
    """An untrained Llava: a vision tower and a projector of 0.04M parameters before the language model of the other
    examples, which has 0.3M."""
    text = build_model(words, seed).config
    sight = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=1,
        image_size=PIXELS,
        patch_size=PATCH,
        initializer_range=0.5,
    )
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=sight,
            text_config=text,
            image_token_id=words.convert_tokens_to_ids(MARK),
            image_seq_length=(PIXELS // PATCH) ** 2,
            vision_feature_layer=-1,
            tie_word_embeddings=True,
            initializer_range=text.initializer_range,
            pad_token_id=text.pad_token_id,
            eos_token_id=text.eos_token_id,
        )
    )


def description(rng: random.Random, grid: Grid, at: Cell) -> Seen:
    """What is in the picture, with errors."""
    right, up, walls = truth(grid, at)
    right, up = (rng.randint(1 - SIZE, SIZE - 1) if rng.random() < ERRING_WAY else number for number in (right, up))
    return Seen(right, up, walls ^ {move for move in MOVES if rng.random() < ERRING_WALL})


def moves_by(rng: random.Random, seen: Seen) -> list[str]:
    """One or two moves nearer to the goal by a description, with random ones in between."""
    moves: list[str] = []
    right, up, walls = seen
    for _ in range(rng.choice((1, 2))):
        free = [move for move in MOVES if move not in walls] or list(MOVES)
        nearer = [move for move in free if MOVES[move][0] * right + MOVES[move][1] * up > 0]
        move = rng.choice(list(MOVES) if rng.random() < ERRING_MOVE else nearer or free)
        moves.append(move)
        right, up, walls = right - MOVES[move][0], up - MOVES[move][1], frozenset()
    return moves


def moves_on(rng: random.Random, grid: Grid, at: Cell) -> list[str]:
    """One or two moves of a shortest path, with random ones in between."""
    moves: list[str] = []
    for _ in range(rng.choice((1, 2))):
        if at == grid.goal:
            break
        ways = [move for move in rng.sample(list(MOVES), len(MOVES)) if grid.free(step(at, move))]
        erring = rng.random() < ERRING_MOVE
        move = rng.choice(list(MOVES)) if erring else min(ways, key=lambda way: grid.distance(step(at, way)))
        moves.append(move)
        at = carry_out(grid, at, [move]).at
    return moves


def spoiled(rng: random.Random, answer: str) -> str:
    """An answer; now and then, its words in another order and some of them twice."""
    words = answer.split(" ")
    return answer if rng.random() >= BAD_FORMAT else " ".join(rng.choices(words, k=len(words)))


def right_description(rng: random.Random) -> Demonstration:
    """What is in some picture."""
    grid, at = scene(rng, SIZE)
    return looking(DESCRIBER), said(truth(grid, at)), drawn(grid, at)


def demonstration(rng: random.Random, role: str) -> Demonstration:
    """What a role says of some picture, or to a description."""
    grid, at = scene(rng, SIZE)
    seen = description(rng, grid, at)
    if role == "solver":
        return told(spoiled(rng, said(seen))), spoiled(rng, " ".join(moves_by(rng, seen))), None
    prompt, answer = (DESCRIBER, said(seen)) if role == "describer" else (ALONE, " ".join(moves_on(rng, grid, at)))
    return looking(prompt), spoiled(rng, answer), drawn(grid, at)


def looking(prompt: str) -> list[dict[str, Any]]:
    """The messages to a role that sees the picture, as templates take them."""
    return [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": prompt}]}]


def tokenized(processor: LlavaProcessor, shown: Sequence[Demonstration]) -> list[Row]:
    """Demonstrations as the model is given them, with labels where the answer is."""
    texts = [processor.apply_chat_template(messages, add_generation_prompt=True) for messages, _, _ in shown]
    pictures = [Image.open(io.BytesIO(picture)).convert("RGB") for _, _, picture in shown if picture is not None]
    made = processor(text=texts, images=pictures)
    pixels = iter(made["pixel_values"])
    answers = processor.tokenizer([f"{answer}{processor.tokenizer.eos_token}" for _, answer, _ in shown])["input_ids"]
    return [
        Row(
            prompt + answer,
            [UNLABELLED] * len(prompt) + answer,
            None if picture is None else torch.from_numpy(next(pixels)),
        )
        for prompt, answer, (_, _, picture) in zip(made["input_ids"], answers, shown, strict=True)
    ]


def given(rows: Sequence[Row], pad: int) -> dict[str, torch.Tensor]:
    """What the model is given of rows: pictures in the order of the rows that have one."""
    pictures = [row.picture for row in rows if row.picture is not None]
    seen = {"pixel_values": torch.stack(pictures)} if pictures else {}
    return {**padded([(row.ids, row.labels) for row in rows], pad), **seen}


def build(
    folder: Path,
    *,
    seed: int = 0,
    steps: int = STEPS,
    count: int = DEMONSTRATIONS,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Build, warm up and save a base model as a Hugging Face folder; the same for the same seed."""
    torch.set_num_threads(1)
    rng = random.Random(f"pictures demonstrations {seed}")
    processor = make_processor()
    model = make_model(processor.tokenizer, seed)
    seeing, begun = round(SEEING * count), round(SEEING * steps)
    right = [right_description(rng) for _ in range(seeing)]
    imperfect = [demonstration(rng, ROLES[i % len(ROLES)]) for i in range(count - seeing)]
    for shown, first, last, lr in ((right, 0, begun, LR_SEEING), (imperfect, begun, steps, LR)):
        rows, progress = tokenized(processor, shown), partial(_later, report, first)
        warm_up(model, rows, rng, steps=last - first, batch=BATCH, lr=lr, report=progress, given=given)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def _later(report: Callable[[int, float], None], by: int, step: int, loss: float) -> None:
    report(by + step, loss)


if __name__ == "__main__":
    build_by_command(build, STEPS)
