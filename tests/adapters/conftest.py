"""A tiny model from scratch with its own tokenizer and chat template, and LoRA adapters for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cotune.adapters.export import Origin, TrainedPolicy, write_export
from cotune.records.policies import ALL_LINEAR, LoraSpec
from cotune.sampling.protocol import Weights

TEMPLATE = (
    "{% if tools %}tools:{% for tool in tools %}{{ tool.function.name }} {% endfor %}\n{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]


def build_model(
    folder: Path, seed: int, *, template: str = TEMPLATE, more: tuple[str, ...] = (), positions: int = 512
) -> Path:
    """A two-layer Qwen3 with random weights and a byte-level tokenizer, which knows `more` tokens too."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({token: i for i, token in enumerate([*alphabet, *SPECIAL, *more])}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>", pad_token="<|end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL[1:], *more]})
    tokenizer.chat_template = template
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("models") / "tiny", 0)


@pytest.fixture(scope="session")
def other_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("models") / "other", 1)


@pytest.fixture(scope="session")
def lora() -> LoraSpec:
    return LoraSpec(rank=4, alpha=8.0, targets=ALL_LINEAR)


@pytest.fixture(scope="session")
def adapter(base: Path, lora: LoraSpec) -> Callable[[int], Weights]:
    """Adapter weights by seed, with both halves random, so that every one changes the model's outputs."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.targets), task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    shapes = {name: tuple(tensor.shape) for name, tensor in get_peft_model_state_dict(model).items()}

    def make(seed: int) -> Weights:
        generator = np.random.default_rng(seed)
        return {name: generator.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}

    return make


@pytest.fixture(scope="session")
def policies(base: Path, lora: LoraSpec, adapter: Callable[[int], Weights]) -> list[TrainedPolicy]:
    """One LoRA for each of two roles."""
    return [
        TrainedPolicy(
            name=role,
            kind="lora",
            version=3,
            roles=(role,),
            model=str(base),
            weights=adapter(seed),
            lora=lora,
            metrics={role: {"reward": 0.5}},
        )
        for seed, role in enumerate(("planner", "writer"))
    ]


@pytest.fixture(scope="session")
def export(policies: list[TrainedPolicy], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exports") / "pair"
    write_export(folder, policies, origin=Origin(run="r1"))
    return folder
