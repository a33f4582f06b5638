"""Sizes of a model, by its configuration alone: counted on tensors without storage, so 70B take no memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from cotune.records.policies import LoraSpec

PIXELS = 4.0
"""Pixel values, their masks and copies, as a multiple of the former."""


class ModelSize(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a causal LM: `parameters` of the base, and of one LoRA in `adapter` (0: all weights are trained)."""

    parameters: int
    adapter: int
    vocabulary: int
    layers: int
    cache_values: int
    """Keys and values that a token leaves in all layers."""
    token_bytes: float
    """Bytes that a training pass keeps for its backward pass, for each token."""
    pass_bytes: float
    """The same for each pass, however few tokens it has: casts of weights."""
    checkpointed_bytes: float
    """Bytes that it keeps for each token with activation checkpointing."""
    rounded: bool = False
    """Whether a CPU multiplies with its frozen layers in bfloat16, in which they are held."""
    head: int = 0
    """Parameters of the output embedding, which with `tied` is the other one too."""
    tied: bool = True
    sees: bool = False
    image_factor: float = 0.0
    """Peak memory of seeing images, as a multiple of their pixel values; 0 where the configuration does not
    tell the sizes of the vision tower."""

    def rounded_bytes(self, heads: int) -> float:
        """Of the frozen weights where `rounded`: layers in bfloat16, embeddings in float32, and the output embedding in
        bfloat16 as often as `heads` says."""
        embeddings = self.head if self.tied else 2 * self.head
        layers = 2.0 * (self.parameters - embeddings)
        return layers + 4.0 * embeddings + 2.0 * heads * self.head


def measure_folder(folder: Path, lora: LoraSpec | None, dtype: str, joined: bool = False) -> ModelSize:
    """The size of the model in a folder, with an adapter or (None) for training all weights. Raises ConfigError."""
    from transformers import AutoConfig

    from cotune.integrations.models.folder.folder import loading, reading

    with reading(folder):
        return measure(AutoConfig.from_pretrained(folder, **loading()), lora, dtype, joined)


def measure(config: Any, lora: LoraSpec | None, dtype: str, joined: bool = False) -> ModelSize:
    """The size of a model of a transformers configuration.

    `joined`: a learner of one process on a CPU, where frozen layers and adapters are one step, with products in
    `dtype`.
    """
    import torch
    from peft import LoraConfig, get_peft_model
    from torch._subclasses.fake_tensor import FakeTensorMode

    from cotune.integrations.models.folder.folder import loading
    from cotune.integrations.models.folder.kinds import auto_class, beside_language, sees_images
    from cotune.trainer.learner.memory.checkpointing import Checkpointing
    from cotune.trainer.learner.memory.products import join_layers

    text = config.get_text_config()
    joins = joined and lora is not None
    held = getattr(torch, dtype) if lora and not joins else torch.float32
    with torch.device("meta"):
        network = auto_class(config).from_config(config, dtype=held, **loading()).eval()
    parameters = sum(p.numel() for p in network.parameters())
    adapter = 0
    if lora:
        chosen = LoraConfig(
            r=lora.rank,
            target_modules=list(lora.targets),
            exclude_modules=beside_language(network),
            task_type="CAUSAL_LM",
        )
        trained = get_peft_model(network, chosen)
        adapter = sum(p.numel() for p in trained.parameters() if p.requires_grad)
    checkpointing = Checkpointing(network)
    with FakeTensorMode(allow_non_fake_inputs=True):
        _fill(network)
        if joins:
            join_layers(network, getattr(torch, dtype))
        cast = "float32" if joins else dtype
        found = {}
        for on in (False, True):
            checkpointing.on = on
            (few, small), (many, large) = ((tokens, _kept(network, tokens, cast)) for tokens in (16, 48))
            each = (large - small) / (many - few)
            found[on] = each, small - few * each
    head = network.get_output_embeddings().weight
    return ModelSize(
        parameters=parameters,
        rounded=joins and dtype == "bfloat16",
        head=head.numel(),
        tied=bool(getattr(text, "tie_word_embeddings", False)),
        adapter=adapter,
        vocabulary=text.vocab_size,
        layers=text.num_hidden_layers,
        cache_values=_cache_values(text),
        token_bytes=found[False][0],
        pass_bytes=max(found[False][1], 0.0),
        checkpointed_bytes=found[True][0],
        sees=sees_images(config),
        image_factor=_image_factor(config.vision_config) if sees_images(config) else 0.0,
    )


def _cache_values(text: Any) -> int:
    """Keys and values that a token leaves in all layers."""
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    groups = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return int(2 * text.num_hidden_layers * groups * width)


def _image_factor(sight: Any) -> float:
    """The pixel values themselves with masks and copies, and of a layer, which keeps nothing for a backward pass, what
    its widest part holds at once: two tensors as wide as a patch is in the tower, and three of its inner width."""
    patch: int | None = getattr(sight, "patch_size", None)
    width: int | None = getattr(sight, "embed_dim", None) or getattr(sight, "hidden_size", None)
    if not isinstance(patch, int) or not width:
        return 0.0
    inner: float = getattr(sight, "intermediate_size", None) or width * getattr(sight, "mlp_ratio", 4)
    frames: int = getattr(sight, "temporal_patch_size", 1)
    return PIXELS + (2 * width + 3 * inner) / (3 * patch**2 * frames)


def _fill(network: Any) -> None:
    """Put tensors of the CPU, without storage, in the place of those on the meta device."""
    import torch

    for module in network.modules():
        for name, old in list(module.named_parameters(recurse=False)):
            new = torch.empty(old.shape, dtype=old.dtype)
            module.register_parameter(name, torch.nn.Parameter(new, requires_grad=old.requires_grad))
        for name, old in list(module.named_buffers(recurse=False)):
            module.register_buffer(name, torch.empty(old.shape, dtype=old.dtype), persistent=False)


def _kept(network: Any, tokens: int, dtype: str) -> int:
    """Bytes that the graph of a pass over so many tokens holds, without the weights."""
    import torch

    own = {p.untyped_storage()._cdata for p in network.parameters()}
    kept: dict[int, Any] = {}

    def keep(tensor: Any) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage

    cast = torch.autocast("cpu", dtype=getattr(torch, dtype), enabled=dtype != "float32")
    with cast, torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda none: none):
        network.base_model(input_ids=torch.zeros((1, tokens), dtype=torch.int64), use_cache=False)
    return sum(storage.nbytes() for storage in kept.values())
