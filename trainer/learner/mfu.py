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
    """Return `mfu`, from 0 to 1, of an update that put `tokens` through the model in `seconds`. It is left out on a CPU
    and on an unknown GPU."""
    if model.device.type != "cuda":
        return {}
    rates = rates_of(torch.cuda.get_device_name(model.device))
    if rates is None:
        return {}
    operations = floating_point_operations(_layer_parameters(model), tokens, all_trained=model.adapter is None)
    return {"mfu": operations / (rates.bfloat16 * seconds)}


def _layer_parameters(model: PolicyModel) -> int:
    """Return the number of parameters without both embeddings."""
    embeddings = {
        id(model.network.get_input_embeddings().weight),
        id(model.network.get_output_embeddings().weight),
    }
    total = 0
    for parameter in model.network.parameters():
        if id(parameter) not in embeddings:
            # Weights of four bits are stored as bytes with two weights each.
            total += parameter.numel() * (2 if parameter.dtype == torch.uint8 else 1)
    return total
