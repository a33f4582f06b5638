"""The tensors of an adapter for a model in a folder, without loading the model."""

from __future__ import annotations

from cotune.integrations.models.folder.meta_model import ModelSkeleton
from cotune.records.policies import LoraSpec


def adapter_shapes(folder: str, lora: LoraSpec) -> dict[str, tuple[int, int]]:
    """By tensor name, the shape of each A, [rank, in], and B, [out, rank]."""
    shapes = {}
    for name, module in ModelSkeleton(folder)._model.named_modules():
        if name.rpartition(".")[2] in lora.targets:
            stem = f"base_model.model.{name}.lora_"
            shapes[f"{stem}A.weight"] = (lora.rank, int(module.in_features))
            shapes[f"{stem}B.weight"] = (int(module.out_features), lora.rank)
    return shapes
