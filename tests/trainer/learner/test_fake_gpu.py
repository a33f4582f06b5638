"""The forward passes of the learner by torch's own rules for a GPU, on tensors without numbers: see `fake_gpu`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen3Config, Qwen3ForCausalLM
from transformers.models.llava import modeling_llava

from cotune.algorithms.samples import TrainRow
from cotune.config.learner import LearnerSettings
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.records.policies import policies_for
from cotune.trainer.learner import load, tree_attention
from cotune.trainer.learner.memory.products import open_joined
from cotune.trainer.learner.policy_model import PolicyModel
from cotune.trainer.learner.teacher import LocalTeacher
from tests.fake_gpu import HostWaits, fake_gpu
from tests.integrations.pictures import asks, picture
from tests.integrations.seeing_models import build_seeing
from tests.trainer.learner.learner_rows import FAST, SMALL, change, make_rows

GPU = torch.device("cuda", 0)
CONFIG = Qwen3Config(
    vocab_size=48,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    max_position_embeddings=128,
    tie_word_embeddings=True,
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HostWaits]:
    """A fake GPU, on which models are made with weights that have no numbers."""

    def make(path: str, dtype: str, device: torch.device, settings: LearnerSettings) -> Any:
        with device:
            return Qwen3ForCausalLM._from_config(copy.deepcopy(config), dtype=getattr(torch, dtype)).eval()

    config = copy.deepcopy(CONFIG)
    config.save_pretrained(tmp_path)
    config._name_or_path = str(tmp_path)
    monkeypatch.setattr(load, "_load", make)
    # Both compare numbers when a model is opened, which there are none of.
    monkeypatch.setattr(load, "_check_head", lambda network: None)
    monkeypatch.setattr(tree_attention, "_computes_the_same", lambda network, flex: True)
    with fake_gpu() as waits:
        yield waits


def opened(kind: Any, settings: LearnerSettings, *, joined: bool = True) -> PolicyModel:
    """The policy of a learner of one process, or of a rank of several unless `joined`."""
    policies = policies_for(kind, ["a"], SMALL)
    open_models = open_joined if joined else load.open_policy_models
    return open_models("fake", policies, settings, reference=["a"])["a"]


def rows_with_everything() -> list[TrainRow]:
    return [change(row, logit_bias=((3, 0.5),), temperature=0.7) for row in make_rows()]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["lora", "lora of a rank", "full"])
@pytest.mark.parametrize("path", ["blocks", "rows"])
def test_forward_passes_stay_on_the_gpu(gpu: HostWaits, kind: str, dtype: str, path: str) -> None:
    settings = change(FAST, device="cuda", dtype=dtype, shared_prompts=path != "rows")
    model = opened(kind.split()[0], settings, joined=kind == "lora")
    assert model.logprob_model._autocast == (dtype == "bfloat16" and kind != "lora")
    assert model.logprob_model.shares is (path != "rows")
    rows = rows_with_everything()
    gpu.names.clear()
    found = [*model.token_logprobs(rows), model.reference_logprobs(rows), model.states(rows)]
    assert [(tensor.device, tensor.dtype) for tensor in found] == [(GPU, torch.float32)] * 4
    assert gpu.names == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_flex_attention_is_called_on_the_gpu(gpu: HostWaits, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    called: list[set[tuple[torch.device, torch.dtype]]] = []

    def kernel(query: Any, key: Any, value: Any, *, block_mask: Any, **more: Any) -> Any:
        parts = (query, key, value)
        called.append({(part.device, part.dtype) for part in parts})
        assert block_mask.kv_indices.device == block_mask.full_kv_num_blocks.device == GPU
        return query.new_empty(query.shape)

    monkeypatch.setattr(tree_attention, "_kernel", lambda device: kernel)
    model = opened("lora", change(FAST, device="cuda", dtype=dtype, tree_attention="flex"))
    gpu.names.clear()
    assert model.token_logprobs(make_rows())[0].device == GPU
    assert called == [{(GPU, getattr(torch, dtype))}]
    assert gpu.names == []


def test_a_teacher_waits_for_the_gpu_once(gpu: HostWaits) -> None:
    teacher = LocalTeacher("fake", change(FAST, device="cuda", dtype="bfloat16", micro_batch_tokens=12))
    gpu.names.clear()
    scores = teacher.logprobs(make_rows())
    assert [len(score) for score in scores] == [len(row.response_ids) for row in make_rows()]
    assert len(gpu.names) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_images_are_seen_on_the_gpu(kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    build_seeing(tmp_path, "llava")
    chat = ChatTemplate.load(tmp_path)
    messages = [asks("what?", picture("red"))]
    config = AutoConfig.from_pretrained(tmp_path)
    row = TrainRow(
        id="0",
        role="a",
        prompt_ids=tuple(chat.render(messages, None)),
        response_ids=(5, 6, 7),
        logprobs=(-1.0, -1.0, -1.0),
        advantage=1.0,
        images=chat.images(messages),
    )
    plain = change(row, id="1", prompt_ids=(5, 6, 7), images=())

    def make(path: str, dtype: str, device: torch.device, settings: LearnerSettings) -> Any:
        with device:
            return AutoModelForImageTextToText.from_config(copy.deepcopy(config), dtype=getattr(torch, dtype)).eval()

    monkeypatch.setattr(load, "_load", make)
    monkeypatch.setattr(load, "_check_head", lambda network: None)
    # The library compares the number of image tokens with that of features: one more wait, for numbers.
    monkeypatch.setattr(modeling_llava, "torch_compilable_check", lambda *values: None)
    with fake_gpu() as waits:
        model = opened(kind, change(FAST, device="cuda", dtype=dtype), joined=False)
        waits.names.clear()
        values, entropy = model.token_logprobs([row, plain])
        assert (values.device, values.dtype, values.shape) == (GPU, torch.float32, (6,))
        assert entropy.device == GPU
        assert waits.names == []
