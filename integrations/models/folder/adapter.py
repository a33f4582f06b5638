"""Reads a LoRA adapter from PEFT's state dict, and checks it against its base model."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from cotune.errors import SamplerError
from cotune.integrations.models.bfloat16 import PackedLinear
from cotune.integrations.models.siblings import group_siblings
from cotune.records.policies import LoraSpec
from cotune.sampling.protocol import Weights

_BASE = "Publish an adapter that was trained on the sampler's base model."


class Factors(NamedTuple):
    """One adapter on the modules that share an input."""

    down: Tensor
    """A^T of all modules side by side: [in, sum of ranks]."""
    ups: dict[str, Tensor]
    """Name of a module -> scale * B^T: [rank, out]."""


Adapter = list[Factors]


def read_adapter(weights: Weights, lora: LoraSpec, model: nn.Module) -> Adapter:
    """Factors from PEFT state-dict names. Raises SamplerError for a name or shape that does not fit `model`."""
    modules = dict(model.named_modules())
    parameter = next(model.parameters())
    # Module -> its factors: "A" [rank, in] and "B" [out, rank].
    factors_of_module: dict[str, dict[str, Tensor]] = {}
    for name, array in weights.items():
        module, letter = _split(name)
        if module not in modules:
            raise SamplerError(f"The adapter has weights for {module!r}, which the model lacks.", _BASE)
        tensor = torch.as_tensor(array).to(device=parameter.device, dtype=parameter.dtype)
        factors_of_module.setdefault(module, {})[letter] = tensor
    for module, factors in factors_of_module.items():
        if set(factors) != {"A", "B"}:
            raise SamplerError(f"The adapter has only lora_{'/'.join(factors)} for {module!r}.", _BASE)
        expected = _in_out(modules[module])
        if (factors["A"].shape[1], factors["B"].shape[0]) != expected:
            raise SamplerError(f"The adapter's shapes for {module!r} do not fit its (in, out) = {expected}.", _BASE)

    # Modules with the same input share one product with all their A factors.
    adapter = []
    for names in group_siblings(factors_of_module):
        down = torch.cat([factors_of_module[name]["A"] for name in names]).T.contiguous()
        ups = {name: (factors_of_module[name]["B"].T * lora.scale).contiguous() for name in names}
        adapter.append(Factors(down, ups))
    return adapter


def _split(name: str) -> tuple[str, str]:
    """Module name and "A" or "B" of a PEFT state-dict name."""
    stem = name.removeprefix("base_model.model.")
    for part in ("A", "B"):
        module, mark, _ = stem.partition(f".lora_{part}.")
        if mark:
            return module, part
    raise SamplerError(f"{name!r} is not the name of a LoRA weight.", "Use PEFT state-dict names.")


def _in_out(module: nn.Module) -> tuple[int, int]:
    if isinstance(module, nn.Linear | PackedLinear):
        return module.in_features, module.out_features
    return tuple(module.weight.shape)  # Conv1D of GPT-2: [in, out]
