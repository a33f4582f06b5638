"""Facts of a model by its configuration: whether it sees images, its class and language model, and the size of its
cache."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any


def sees_images(config: Any) -> bool:
    """Whether a model with this configuration of transformers reads images in addition to text."""
    if getattr(config, "vision_config", None) is None:
        return False
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    return config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


def auto_class(config: Any) -> Any:
    """The class of transformers for a model with this configuration, which includes the vision part of a model."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if sees_images(config) else AutoModelForCausalLM


def cached_numbers(text_config: Any) -> int:
    """Numbers (keys and values) that one token has in the cache, in all layers together."""
    key_heads = getattr(text_config, "num_key_value_heads", None) or text_config.num_attention_heads
    return int(2 * text_config.num_hidden_layers * key_heads * head_width(text_config))


def head_width(text_config: Any) -> int:
    """The width of one attention head."""
    return int(getattr(text_config, "head_dim", None) or text_config.hidden_size // text_config.num_attention_heads)


def language_prefix(network: Any) -> str:
    """The prefix of the names of the language model's modules in a network that sees images.

    Empty for any other network, because all of it is a language model.
    """
    if not sees_images(network.config):
        return ""
    decoder = network.get_decoder()
    return next(f"{name}." for name, module in network.named_modules() if module is decoder)


def beside_language(network: Any) -> str | None:
    """A pattern of the names of all modules outside the language model; None for a network without others.

    LoRA must not adapt these modules, because engines serve adapters of the language model only.
    """
    prefix = language_prefix(network)
    return rf"(?!{re.escape(prefix)}).*" if prefix else None


def end_ids(*settings: int | Sequence[int] | None) -> tuple[int, ...]:
    """The token ids that end a reply, from settings that each name one id, several, or none. Each id comes once."""
    ids: dict[int, None] = {}  # a set that keeps the order
    for setting in settings:
        if isinstance(setting, Sequence):
            ids |= dict.fromkeys(setting)
        elif setting is not None:
            ids[setting] = None
    return tuple(ids)
