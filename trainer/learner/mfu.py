"""The share of a GPU's arithmetic that an update has used (MFU)."""

from __future__ import annotations

import torch

from cotune.trainer.learner.gpu_rates import rates_of
from cotune.trainer.learner.policy_model import PolicyModel


def floating_point_operations(layer_parameters: int, tokens: int, *, all_trained: bool) -> float:
    """Return the floating-point operations of training on this number of tokens (arXiv 2001.08361, 2.1).

    Each token takes 2 operations for each parameter of the layers in the forward pass, 2 for the gradient of its
    inputs, and 2 for the gradient of the parameter if it is trained. Attention and output embeddings are left out.
    """
    return (6.0 if all_trained else 4.0) * layer_parameters * tokens


def model_utilization(model: PolicyModel, tokens: int, seconds: float) -> dict[str, float]:
    """`mfu`, from 0 to 1, of an update that put so many tokens through the model; nothing without a known GPU."""
    if model.device.type != "cuda":
        return {}
    rates = rates_of(torch.cuda.get_device_name(model.device))
    if rates is None:
        return {}
    ends = {id(module.weight) for module in _embedding_parameters(model)}
    held = [p for p in model.network.parameters() if id(p) not in ends]
    layers = sum(p.numel() * (2 if p.dtype == torch.uint8 else 1) for p in held)  # of four bits two are in a byte
    return {
        "mfu": floating_point_operations(layers, tokens, all_trained=model.adapter is None) / (rates.bfloat16 * seconds)
    }


def _embedding_parameters(model: PolicyModel) -> list[torch.nn.Module]:
    return [model.network.get_input_embeddings(), model.network.get_output_embeddings()]
