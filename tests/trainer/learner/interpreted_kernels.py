"""Run by `test_fused_layers`: networks with fused kernels, interpreted on the CPU, compute what they did before. Prints
each network that its arguments name with the number of its modules that have a kernel."""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # isort: skip - before Triton is imported

from typing import Any

import numpy as np
import torch
import transformers
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime import interpreter

from cotune.integrations.models.liger.kernels import load_kernels
from cotune.trainer.learner import fused_layers
from cotune.trainer.learner.token_tree import token_tree
from cotune.trainer.learner.tree_attention import TreePass, attends_over_trees, states_over

SEQUENCES = [[5, 6, 7, 8, 9, 10], [5, 6, 7, 1, 2], [5, 6, 3]]


def complete_the_interpreter() -> None:
    """Give Triton's interpreter what it lacks: numbers with a `to`, and the library function that norms take."""
    convert = interpreter._implicit_cvt

    def converted(value: Any) -> Any:
        if isinstance(value, float):
            return tl.tensor(interpreter.TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)
        return convert(value)

    interpreter._implicit_cvt = converted
    libdevice.rsqrt = lambda x: 1.0 / tl.sqrt(x)


def build(name: str) -> Any:
    config = getattr(transformers, f"{name}Config")(
        vocab_size=32,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        use_sliding_window=False,
    )
    torch.manual_seed(0)
    network = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for parameter in network.parameters():  # weights of norms are 1 at first, and biases 0
        parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return network


def results(network: Any) -> list[torch.Tensor]:
    """The last hidden states of a tree, and the gradients of all weights."""
    network.zero_grad()
    states = states_over(network, TreePass(token_tree(SEQUENCES), torch.device("cpu")))
    factors = torch.randn(states.shape, generator=torch.Generator().manual_seed(1))
    (states * factors).sum().backward()
    gradients = [parameter.grad.clone() for parameter in network.parameters() if parameter.grad is not None]
    return [states.detach(), *gradients]


def main() -> None:
    torch.set_num_threads(1)
    complete_the_interpreter()
    fused_layers.NARROW = 0  # interpreting so many rows takes minutes
    kernels = load_kernels()
    for name in sys.argv[1:]:
        network = build(name)
        assert attends_over_trees(network)
        expected = results(network)
        replaced = fused_layers.fused_forwards(network, kernels, torch.device("cpu"), torch.float32)
        for module, forward in replaced:
            module.forward = forward
        found = results(network)
        assert len(found) == len(expected) > 1
        for one, other in zip(found, expected, strict=True):
            assert (one - other).norm() <= 1e-4 * other.norm(), name
        sys.stdout.write(f"{name}: {len(replaced)}\n")


if __name__ == "__main__":
    main()
