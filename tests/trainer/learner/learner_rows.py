"""What the learners' tests share: a tiny model with sharp outputs, rows to train on, and ways to look at weights."""

import random

import msgspec
import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from cotune.algorithms.samples import TrainRow
from cotune.records.policies import LoraSpec
from tests.trainer.learner.forced import ForcedSettings

SMALL = LoraSpec(rank=4, alpha=8.0)
FAST = ForcedSettings(lr=1e-2, device="cpu")
VOCABULARY = 48


def build_learner_base(folder, layers=2):
    """Save an untrained Qwen3 with tied embeddings; returns its folder."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    network = Qwen3ForCausalLM(config)
    for parameter in network.parameters():  # sharper than the usual start, so that gradients are not tiny
        parameter.data.mul_(3.0) if parameter.dim() > 1 else None
    network.save_pretrained(folder)
    return str(folder)


def make_rows(groups=3, k=4, role="a", seed=0, prompt=(3, 9), response=(1, 6), temperature=1.0):
    """Groups of k rows with one prompt each, of uneven lengths, advantages that sum to zero in each group."""
    rng = random.Random(seed)
    found = []
    for group in range(groups):
        prompt_ids = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(*prompt)))
        for member in range(k):
            ids = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(*response)))
            found.append(
                TrainRow(
                    id=f"{group}.{member}",
                    role=role,
                    prompt_ids=prompt_ids,
                    response_ids=ids,
                    logprobs=(-3.9,) * len(ids),
                    advantage=1.0 if member % 2 else -1.0,
                    temperature=temperature,
                )
            )
    return found


def on_policy(learner, policy, rows):
    """The rows with the trainer's own log-probabilities as the sampler's."""
    found = learner.logprobs(policy, rows)
    return [msgspec.structs.replace(r, logprobs=tuple(p.tolist())) for r, p in zip(rows, found, strict=True)]


def snapshot(learner, policy):
    return {name: array.copy() for name, array in learner.weights(policy).items()}


def same(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def change(settings, **fields):
    return msgspec.structs.replace(settings, **fields)
