"""LoRA adapters of many policies in one forward pass: each row of a batch goes through its own adapter.

Rows are sorted by adapter, so every target module adds (x A^T) B^T * scale on one contiguous slice per adapter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cotune.errors import SamplerError
from cotune.integrations.models.bfloat16 import PackedLinear
from cotune.records.policies import LoraSpec
from cotune.sampling.protocol import Weights


class Factors(NamedTuple):
    """One adapter on one module: A^T [in, rank] and scale * B^T [rank, out]."""

    down: Tensor
    up: Tensor


Adapter = dict[str, Factors]
"""One adapter by module name."""


def read_adapter(weights: Weights, lora: LoraSpec, model: nn.Module) -> Adapter:
    """Factors from PEFT state-dict names. Raises SamplerError for a name or shape that does not fit `model`."""
    modules = dict(model.named_modules())
    parameter = next(model.parameters())
    halves: dict[str, dict[str, Tensor]] = {}
    for name, array in weights.items():
        module, part = _split(name)
        if module not in modules:
            raise SamplerError(f"The adapter has weights for {module!r}, which the model lacks.", _BASE)
        tensor = torch.as_tensor(array).to(device=parameter.device, dtype=parameter.dtype)
        halves.setdefault(module, {})[part] = tensor
    adapter: Adapter = {}
    for module, pair in halves.items():
        if set(pair) != {"A", "B"}:
            raise SamplerError(f"The adapter has only lora_{'/'.join(pair)} for {module!r}.", _BASE)
        expected = _in_out(modules[module])
        if (pair["A"].shape[1], pair["B"].shape[0]) != expected:
            raise SamplerError(f"The adapter's shapes for {module!r} do not fit its (in, out) = {expected}.", _BASE)
        adapter[module] = Factors(pair["A"].T.contiguous(), (pair["B"].T * lora.scale).contiguous())
    return adapter


class LoraRows:
    """Patches the target modules of one model. `route` says which rows use which adapter in the next passes."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._patched: dict[str, _Patch] = {}

    def add(self, key: int, adapter: Adapter) -> None:
        """Make an adapter available to `route` under `key`."""
        for name, factors in adapter.items():
            if name not in self._patched:
                self._patched[name] = _Patch(self._modules[name])
            self._patched[name].factors[key] = factors

    def remove(self, key: int) -> None:
        for patch in self._patched.values():
            patch.factors.pop(key, None)

    def route(self, segments: Sequence[tuple[int, int, int]]) -> None:
        """Rows [low, high) go through adapter `key`, for each (key, low, high); other rows through the base."""
        for patch in self._patched.values():
            patch.active = [(low, high, patch.factors[key]) for key, low, high in segments if key in patch.factors]

    @contextlib.contextmanager
    def removed(self) -> Iterator[None]:
        """Take the patches off while the model is copied."""
        for name in self._patched:
            del self._modules[name].forward
        try:
            yield
        finally:
            for name, patch in self._patched.items():
                self._modules[name].forward = patch.forward


class _Patch:
    """Replaces the forward of one module."""

    def __init__(self, module: nn.Module) -> None:
        self.factors: dict[int, Factors] = {}
        self.active: list[tuple[int, int, Factors]] = []
        self.base: Callable[[Tensor], Tensor] = module.forward
        module.forward = self.forward

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        for low, high, (down, up) in self.active:
            part = x[low:high].reshape(-1, x.shape[-1])
            y[low:high].view(-1, y.shape[-1]).addmm_(part @ down, up)
        return y


_BASE = "Publish weights that were trained from the sampler's own model."


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
