"""The optimizer of a policy, and weights of four bits. bitsandbytes makes both smaller on a GPU."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from cotune.config.learner import LearnerSettings
from cotune.errors import ConfigError, install_extra
from cotune.trainer.config.learner import FULL_LR, LORA_LR
from cotune.trainer.learner.policy_model import PolicyModel

EPS = 1e-8
"""AdamW's epsilon, the default of its paper (arXiv 1711.05101) and of PyTorch."""


def check_hardware(settings: LearnerSettings) -> None:
    """Raise ConfigError for settings that need a GPU or bitsandbytes on a machine without it."""
    for name, (value, usual) in settings.needing_gpu.items():
        field = f"learner.{name}"
        if settings.device == "cpu" or not torch.cuda.is_available():
            raise ConfigError(field, value, "needs a GPU", f"Use {usual}, or train on a GPU.")
        _bitsandbytes(field, value)


def build_optimizer(model: PolicyModel, settings: LearnerSettings) -> torch.optim.Optimizer:
    """Build AdamW for the trained tensors of the policy, with moments in fp32 or (adamw8bit, arXiv 2110.02861) in
    blocks of 8 bits."""
    parameters = list(model.parameters().values())
    shared: dict[str, Any] = {
        "lr": learning_rate(model, settings),
        "betas": settings.betas,
        "eps": EPS,
        # No decay: an adapter starts at zero, and clips and the KL penalty keep all weights near their initial values.
        "weight_decay": 0.0,
    }
    if settings.optimizer == "adamw8bit":
        library = _bitsandbytes("learner.optimizer", "adamw8bit")
        optimizer: torch.optim.Optimizer = library.optim.AdamW8bit(parameters, **shared)
        return optimizer
    return torch.optim.AdamW(parameters, fused=model.device.type in ("cpu", "cuda"), **shared)


def learning_rate(model: PolicyModel, settings: LearnerSettings) -> float:
    """Return the learning rate of the settings, else the default for adapters or full weights."""
    default = LORA_LR if model.spec.kind == "lora" else FULL_LR
    return default if settings.lr is None else settings.lr


def quantization(settings: LearnerSettings) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that quantize frozen weights to NF4, with quantized scales (arXiv
    2305.14314). Empty if the settings ask for no quantization."""
    if settings.quantize == "none":
        return {}
    from transformers import BitsAndBytesConfig

    four_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=getattr(torch, settings.precision),
    )
    return {"quantization_config": four_bits, "device_map": {"": settings.device.replace("auto", "cuda")}}


def _bitsandbytes(field: str, value: str) -> Any:
    """Import bitsandbytes. Raises ConfigError, which names the setting that needs it, if it is not installed."""
    try:
        return importlib.import_module("bitsandbytes")
    except ImportError as error:
        raise ConfigError(field, value, "needs bitsandbytes", install_extra("quantize")) from error
