"""Memory of passes over a tree of tokens."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from cotune.algorithms.recipes import LossSpec
from cotune.algorithms.samples import TrainRow
from cotune.records.policies import policies_for
from cotune.trainer.learner.local import LocalLearner
from tests.trainer.learner.allocations import peak_mb
from tests.trainer.learner.learner_rows import FAST, SMALL, change

VOCABULARY, TURNS, ANSWER, OBSERVATION = 16_384, 6, 32, 32


def episode() -> list[TrainRow]:
    """Of each turn four candidates, of which the first goes on."""
    chance = random.Random(0)
    rows, prompt = [], tuple(chance.choices(range(VOCABULARY), k=64))
    for turn in range(TURNS):
        answers = [tuple(chance.choices(range(VOCABULARY), k=ANSWER)) for _ in range(4)]
        rows += [
            TrainRow(
                id=f"{turn}.{number}",
                role="a",
                prompt_ids=prompt,
                response_ids=answer,
                logprobs=(-6.0,) * ANSWER,
                advantage=1.0 if number % 2 else -1.0,
            )
            for number, answer in enumerate(answers)
        ]
        prompt = (*prompt, *answers[0], *chance.choices(range(VOCABULARY), k=OBSERVATION))
    return rows


def test_passes_over_a_tree_take_no_more_than_passes_of_as_many_tokens_over_padded_rows(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCABULARY, **shape, **heads)).save_pretrained(tmp_path)
    peaks, passes = {}, {}
    for shared in (False, True):
        settings = change(FAST, micro_batch_tokens=1024, shared_prompts=shared, activation_checkpointing=False)
        learner = LocalLearner.open(str(tmp_path), policies_for("lora", ["a"], SMALL), settings, LossSpec())
        found: dict[str, float] = {}
        peaks[shared] = peak_mb(lambda learner=learner, found=found: found.update(learner.update("a", episode())))
        passes[shared] = found["computed_tokens"]
    assert passes[True] < passes[False] / 4
    assert 40 < peaks[True] < 1.05 * peaks[False]  # it holds the hidden states of more response tokens
