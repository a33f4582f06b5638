"""One product for layers of one input."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cotune.integrations.models import bfloat16
from cotune.integrations.models.siblings import Joint, group_siblings


def test_names_are_joined_in_the_order_in_which_a_model_asks() -> None:
    assert group_siblings(["up_proj", "gate_proj", "down_proj"]) == [["gate_proj", "up_proj"], ["down_proj"]]
    assert group_siblings(["v_proj", "q_proj", "lm_head"]) == [["q_proj", "v_proj"], ["lm_head"]]
    assert group_siblings([]) == []
    assert group_siblings(["1.mlp.up_proj", "0.mlp.up_proj", "0.mlp.gate_proj", "0.attn.k_proj"]) == [
        ["0.mlp.gate_proj", "0.mlp.up_proj"],
        ["1.mlp.up_proj"],
        ["0.attn.k_proj"],
    ]


def test_each_input_is_computed_with_once_and_nothing_is_kept() -> None:
    seen: list[torch.Tensor] = []

    def compute(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return torch.cat([x, 2 * x, 3 * x], -1)

    joint, x, other = Joint(compute, [2, 2, 2]), torch.ones(1, 2), torch.zeros(1, 2)
    assert [float(joint.part(number, x)[0, 0]) for number in range(3)] == [1, 2, 3]
    assert len(seen) == 1
    assert joint._input is None
    joint.part(0, x)
    x.add_(1)  # what was dropped is computed anew
    assert float(joint.part(1, other)[0, 0]) == 0
    assert float(joint.part(2, other)[0, 0]) == 0
    assert float(joint.part(1, x)[0, 0]) == 4
    assert [len(seen), joint._input is x] == [4, True]


def test_a_part_may_be_written_to() -> None:
    joint, x = Joint(lambda x: torch.cat([x, x], -1), [2, 2]), torch.ones(1, 2)
    joint.part(0, x).add_(5)
    assert joint.part(1, x).tolist() == [[1, 1]]


@pytest.mark.usefixtures("bfloat16_products")
def test_joined_layers_are_as_exact_as_layers_alone() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.k_proj, self.q_proj = nn.Linear(64, 32, bias=False), nn.Linear(64, 48)
            self.lm_head = nn.Linear(64, 1000, bias=False)

        def get_output_embeddings(self) -> nn.Module:
            return self.lm_head

    torch.manual_seed(0)
    model = Attention().requires_grad_(False)
    layers = {name: (layer.weight.bfloat16().double(), layer.bias) for name, layer in model.named_children()}  # type: ignore[union-attr, operator]
    bfloat16.pack_linear_layers(model)
    x = torch.randn(2, 3, 64)
    for name in ("q_proj", "k_proj", "lm_head"):
        weight, bias = layers[name]
        expected = x.bfloat16().double() @ weight.T + (0 if bias is None else bias)
        found = getattr(model, name)(x)
        bound = 1e-3 if name == "lm_head" else 2**-8 * expected.abs().max()
        assert (found - expected).abs().max() <= bound
        assert found.shape == (2, 3, len(weight))
