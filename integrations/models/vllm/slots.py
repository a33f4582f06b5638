"""The values of adapters in vLLM's slots, which are the buffers on the device that its kernels read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

MISSING = "missing"
"""The digest of an adapter that is in no slot."""
UNKNOWN = "unknown"
"""The digest if this version of vLLM has its slots in another form."""


def slot_digest(manager: Any, lora_id: int) -> str:
    """Compute the digest of an adapter's slot in vLLM's `LoRAModelManager`, on the device."""
    if lora_id not in manager.lora_index_to_id:
        return MISSING
    slot = manager.lora_index_to_id.index(lora_id)
    digest = hashlib.sha256()
    n_tensors = 0
    for name, values in _slot_tensors(manager, slot):
        if values.numel():
            digest.update(f"{name}{tuple(values.shape)}{torch.hash_tensor(values).item()}".encode())
            n_tensors += 1
    # Without any tensor, this version of vLLM has its slots in another form.
    return digest.hexdigest() if n_tensors else UNKNOWN


def _slot_tensors(manager: Any, slot: int) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one slot, each with a name.

    In vLLM's layers, attributes like `lora_a_stacked` are tuples of tensors [slots, ...], which hold all slots.
    """
    for name, layer in sorted(manager.modules.items()):
        for attribute, stacked in sorted(vars(layer).items()):
            if not attribute.endswith("_stacked") or not isinstance(stacked, tuple | list):
                continue
            for number, tensor in enumerate(stacked):
                if isinstance(tensor, Tensor) and len(tensor) > slot:
                    yield f"{name}.{attribute}.{number}", tensor[slot]
