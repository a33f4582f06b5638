"""Kernels of a library in a network: the same numbers where they fit, and a network as it was where they do not."""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import silu
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from cotune.integrations.models.liger.kernels import Kernels
from cotune.trainer.learner import fused_layers

LAYERS = 2


def norm(x, weight, eps):
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


PLAIN = Kernels(norm, apply_rotary_pos_emb, lambda gate, up: silu(gate) * up)
WRONG = {
    "norm": lambda x, weight, eps: norm(x, 1 + weight, eps),
    "rotate": lambda query, key, cos, sin: apply_rotary_pos_emb(query, key, cos, -sin),
    "silu_product": lambda gate, up: silu(up) * gate,
}


SHAPE = {
    "vocab_size": 32,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture
def network():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="liger-kernel is not installed")
@pytest.mark.parametrize(
    "networks", [("Qwen3",), pytest.param(("Qwen2", "Llama"), marks=pytest.mark.long)], ids="-".join
)
def test_interpreted_kernels_compute_what_transformers_does(networks):
    script = [sys.executable, "-W", "ignore", "-m", "tests.trainer.learner.interpreted_kernels", *networks]
    done = subprocess.run(script, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    plain = 1 + LAYERS * 4  # the last norm; two norms, the attention and the feed-forward of each layer
    kernels = {"Qwen3": plain + 2 * LAYERS, "Qwen2": plain, "Llama": plain}
    assert done.stdout.splitlines()[: len(networks)] == [f"{name}: {kernels[name]}" for name in networks]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_that_compute_the_same_are_taken(network, dtype):
    network = network.to(dtype)
    ids = torch.tensor([[1, 2, 3, 4]])
    expected = network(input_ids=ids).logits
    replaced = fused_layers.fused_forwards(network, PLAIN, torch.device("cpu"), dtype)
    for module, forward in replaced:
        module.forward = forward
    assert len(replaced) == 1 + 4 * LAYERS
    assert torch.equal(network(input_ids=ids).logits, expected)


@pytest.mark.parametrize("name", WRONG)
def test_a_kernel_that_computes_other_values_is_refused(network, name):
    kernels = PLAIN._replace(**{name: WRONG[name]})
    with pytest.raises(fused_layers.KernelDiffers, match="other values"):
        fused_layers.fused_forwards(network, kernels, torch.device("cpu"), torch.float32)


def test_layers_of_another_form_stay_as_they_are(network):
    for layer in network.model.layers:
        layer.mlp.act_fn = torch.nn.GELU()
    replaced = [module for module, _ in fused_layers.fused_forwards(network, PLAIN, torch.device("cpu"), torch.float32)]
    assert not any(layer.mlp in replaced for layer in network.model.layers)
    assert len(replaced) == 1 + 3 * LAYERS


def test_networks_without_storage_have_kernels_too(network):
    """Ranks that divide a model get its weights after its layers."""
    replaced = fused_layers.fused_forwards(network.to("meta"), PLAIN, torch.device("cpu"), torch.float32)
    assert len(replaced) == 1 + 4 * LAYERS


def test_heads_that_are_rotated_in_part_are_left_to_transformers():
    network = Phi3ForCausalLM(Phi3Config(**SHAPE, pad_token_id=0, partial_rotary_factor=0.67)).eval()
    ids = torch.tensor([[1, 2, 3, 4]])
    expected = network(input_ids=ids).logits
    attentions = 0
    for module, forward in fused_layers.fused_forwards(network, PLAIN, torch.device("cpu"), torch.float32):
        module.forward = forward
        attentions += hasattr(module, "head_dim")
    assert attentions == LAYERS
    assert torch.equal(network(input_ids=ids).logits, expected)


def test_a_gpu_on_which_they_fail_computes_without_them(network, monkeypatch, caplog):
    monkeypatch.setattr(fused_layers, "load_kernels", lambda: PLAIN)
    with caplog.at_level(logging.WARNING, "cotune"):
        fused_layers.fuse_layers(network, torch.device("cuda"), torch.float32)  # which this build of torch lacks
    assert "Fused kernels cannot be used here" in caplog.text
    assert not any("forward" in vars(module) for module in network.modules())
