"""An adapter's matrices in the precision of a pass, copied by one kernel when the pass begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


class AdapterCopies:
    """Copies of the active adapter's matrices in the precision of products, all made at once when a pass begins."""

    def __init__(self, layers: Sequence[Any], dtype: torch.dtype) -> None:
        self.layers = layers
        self._dtype = dtype
        self._copies: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def refresh(self) -> None:
        """Copy the present matrices of the active adapter. Graphs of earlier passes keep their copies."""
        if self._dtype == torch.float32:
            return  # products use the matrices themselves
        matrices: list[Tensor] = []
        for layer in self.layers:
            name = active_adapter(layer)
            if name is not None:
                matrices += [layer.lora_A[name].weight, layer.lora_B[name].weight]
        if not matrices:
            return
        sizes = [matrix.numel() for matrix in matrices]
        buffer = torch.empty(sum(sizes), dtype=self._dtype, device=matrices[0].device)
        copies = [part.view_as(matrix) for part, matrix in zip(buffer.split(sizes), matrices, strict=True)]
        with torch.no_grad():
            torch._foreach_copy_(copies, matrices)
        for matrix, copy in zip(matrices, copies, strict=True):
            self._copies[matrix] = (matrix._version, copy)

    def of(self, matrix: Tensor) -> Tensor:
        """Return a matrix in the precision of products: its copy, or a new one if it has changed since `refresh`."""
        version, copy = self._copies.get(matrix, (None, None))
        if copy is None or version != matrix._version:
            return matrix.detach().to(self._dtype)
        return copy


def active_adapter(layer: Any) -> str | None:
    """Return the name of the active adapter of a layer of PEFT; None if the layer computes with its base only."""
    if layer.disable_adapters:
        return None
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    return names[0] if names else None
