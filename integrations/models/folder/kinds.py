"""Which models see images beside text, and what that means for their class and their parts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any


def sees_images(config: Any) -> bool:
    """Whether a model of this transformers configuration reads images beside text."""
    if getattr(config, "vision_config", None) is None:
        return False
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    return config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


def auto_class(config: Any) -> Any:
    """The class of transformers that opens a model of this configuration with all that it sees."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if sees_images(config) else AutoModelForCausalLM


def language_prefix(network: Any) -> str:
    """What the names of modules begin with that are the language model's, inside a network that sees images; empty for
    any other network, which is a language model as a whole."""
    if not sees_images(network.config):
        return ""
    decoder = network.get_decoder()
    return next(f"{name}." for name, module in network.named_modules() if module is decoder)


def beside_language(network: Any) -> str | None:
    """A pattern of the names of all modules that are not the language model's, which no LoRA adapts: engines serve
    adapters of the language model alone. None for a network that is one as a whole."""
    prefix = language_prefix(network)
    return rf"(?!{re.escape(prefix)}).*" if prefix else None


def end_ids(*settings: int | Sequence[int] | None) -> tuple[int, ...]:
    """Distinct ids of settings that hold one end token, several or none."""
    ids = [i for ids in settings if ids is not None for i in (ids if isinstance(ids, Sequence) else [ids])]
    return tuple(dict.fromkeys(ids))
