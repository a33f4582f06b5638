"""LoRA adapters of many policies in one forward pass: each row of a batch goes through its own adapter.

Rows are sorted by adapter, so every target module adds (x A^T) B^T * scale on one contiguous slice per adapter. Modules
of one input share the first product.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cotune.errors import SamplerError
from cotune.integrations.models.bfloat16 import PackedLinear
from cotune.integrations.models.siblings import Joint, siblings
from cotune.records.policies import LoraSpec
from cotune.sampling.protocol import Weights


class Factors(NamedTuple):
    """One adapter on the modules of one input: A^T of all side by side [in, sum of ranks], and scale * B^T [rank, out]
    of each by its name."""

    down: Tensor
    ups: dict[str, Tensor]


Adapter = list[Factors]


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
    for module, pair in halves.items():
        if set(pair) != {"A", "B"}:
            raise SamplerError(f"The adapter has only lora_{'/'.join(pair)} for {module!r}.", _BASE)
        expected = _in_out(modules[module])
        if (pair["A"].shape[1], pair["B"].shape[0]) != expected:
            raise SamplerError(f"The adapter's shapes for {module!r} do not fit its (in, out) = {expected}.", _BASE)
    return [
        Factors(
            torch.cat([halves[name]["A"] for name in names]).T.contiguous(),
            {name: (halves[name]["B"].T * lora.scale).contiguous() for name in names},
        )
        for names in siblings(halves)
    ]


class LoraRows:
    """Patches the target modules of one model. `route` says which rows use which adapter in the next passes."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._patched: dict[str, _Patch] = {}
        self._adapters: dict[int, Adapter] = {}

    def add(self, key: int, adapter: Adapter) -> None:
        """Make an adapter available to `route` under `key`."""
        self._adapters[key] = adapter
        for name in (name for factors in adapter for name in factors.ups):
            if name not in self._patched:
                self._patched[name] = _Patch(self._modules[name])

    def remove(self, key: int) -> None:
        self._adapters.pop(key, None)

    def route(self, segments: Sequence[tuple[int, int, int]]) -> None:
        """Rows [low, high) go through adapter `key`, for each (key, low, high); other rows through the base."""
        for patch in self._patched.values():
            patch.active = []
        for key, low, high in segments:
            for down, ups in self._adapters.get(key, ()):
                joint = Joint(partial(_down, low, high, down), [len(up) for up in ups.values()])
                for number, (name, up) in enumerate(ups.items()):
                    self._patched[name].active.append((low, high, partial(joint.part, number), up))

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
        self.active: list[tuple[int, int, Callable[[Tensor], Tensor], Tensor]] = []
        self.base: Callable[[Tensor], Tensor] = module.forward
        module.forward = self.forward

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        for low, high, down, up in self.active:
            _rows(y, low, high).view(-1, y.shape[-1]).addmm_(down(x), up)  # an error where it would be a copy
        return y


def _rows(x: Tensor, low: int, high: int) -> Tensor:
    return x if high - low == len(x) else x[low:high]


def _down(low: int, high: int, down: Tensor, x: Tensor) -> Tensor:
    return _rows(x, low, high).reshape(-1, x.shape[-1]) @ down


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
