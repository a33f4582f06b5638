"""Products of float32 by oneDNN are those of torch."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import Qwen3ForCausalLM

from cotune.integrations.models import float32
from cotune.integrations.models.folder.adapter import read_adapter
from cotune.integrations.models.transformers.lora import LoraRows
from cotune.records.policies import LoraSpec
from tests.integrations import tiny_models

THERE = pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="torch has no oneDNN here")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor that has it, for products of any size."""
    monkeypatch.setattr(float32, "prefers_onednn", lambda: True)
    monkeypatch.setattr(float32, "WORTH", 1)


@THERE
@pytest.mark.parametrize("rows", [(1,), (7,), (2, 5), (96,)])
@pytest.mark.parametrize("transposed", [False, True])
def test_products_are_those_of_torch(asked: None, rows: tuple[int, ...], transposed: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(*rows, 48), torch.randn(48, 40).t() if transposed else torch.randn(40, 48)
    torch.testing.assert_close(float32.product(x, weight), nn.functional.linear(x, weight), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("vendor", "wide", "expected"),
    [("AuthenticAMD", True, True), ("AuthenticAMD", False, False), ("GenuineIntel", True, False)],
)
@THERE
def test_the_processor_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vendor: str, wide: bool, expected: bool
) -> None:
    described = tmp_path / "cpuinfo"
    described.write_text(f"processor : 0\nvendor_id : {vendor}\n")
    monkeypatch.setattr(float32, "Path", lambda _: described)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: wide)
    assert float32.prefers_onednn.__wrapped__() is expected


def test_other_precisions_and_small_products_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("oneDNN was asked")

    monkeypatch.setattr(float32, "prefers_onednn", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", refuse, raising=False)
    float32.product(torch.randn(2, 8), torch.randn(4, 8))
    float32.product(torch.randn(1024, 64).bfloat16(), torch.randn(64, 64).bfloat16())
    with pytest.raises(AssertionError, match="asked"):
        float32.product(torch.randn(1024, 64), torch.randn(64, 64))


@THERE
def test_a_sped_model_answers_as_before_and_can_be_copied(asked: None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 6, bias=False)).eval()
    x, before = torch.randn(3, 12), copy.deepcopy(model)
    float32.speed_linear_layers(model)
    with torch.inference_mode():
        torch.testing.assert_close(copy.deepcopy(model)(x), before(x))
        torch.testing.assert_close(model(x), before(x))
    assert list(model.state_dict()) == list(before.state_dict())


def test_a_product_of_bfloat16_has_a_float32_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a kernel for it, part by part of the weight: here three parts, the last one smaller."""
    monkeypatch.setattr(float32, "WIDENED_ROWS", 16)
    x, weight = torch.randn(5, 24).bfloat16(), torch.randn(40, 24).bfloat16()
    found = float32.widened_product(x, weight)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, (x.double() @ weight.double().t()).float(), atol=1e-5, rtol=1e-5)


def test_logits_of_a_bfloat16_model_are_not_rounded_also_with_an_adapter_on_the_output_layer() -> None:
    torch.manual_seed(0)
    config = tiny_models.config("qwen3", 300)
    model = Qwen3ForCausalLM(config).bfloat16().eval()
    weight = model.lm_head.weight.double()
    states: list[torch.Tensor] = []
    model.lm_head.register_forward_pre_hook(lambda module, inputs: states.append(inputs[0]))
    float32.widen_logits(model)
    with torch.inference_mode():
        logits = model(torch.tensor([[5, 6, 7]])).logits
    exact = states[0].double() @ weight.T
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), exact, atol=1e-5, rtol=1e-5)

    rows = LoraRows(model)
    factors = {"lora_A": (2, config.hidden_size), "lora_B": (300, 2)}
    names = {
        f"base_model.model.lm_head.{name}.weight": np.full(size, 0.5, np.float32) for name, size in factors.items()
    }
    rows.add(1, read_adapter(names, LoraSpec(rank=2, alpha=2.0), model))
    rows.route([(1, 0, 1)])
    with torch.inference_mode():
        adapted = model(torch.tensor([[5, 6, 7]])).logits
    assert adapted.dtype == torch.float32
    added = (states[-1].float() @ torch.full((config.hidden_size, 1), 0.5)).expand_as(adapted)
    torch.testing.assert_close(adapted - logits, added, atol=0.05, rtol=0.05)
