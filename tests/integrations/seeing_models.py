"""Tiny models that see images, from their configurations: random weights, and processors without torchvision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    CLIPVisionConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor

from cotune.integrations.models.folder.vision import ImageInputs
from tests.integrations.tiny_models import config, tokenizer

IMAGE = "<image>"
TEMPLATE = """
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}
{%- if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""
PARTS_ONLY = TEMPLATE.replace("{% if m.content is string %}{{ m.content }}{% else %}", "").replace(
    "{% endfor %}{% endif %}<|im_end|>", "{% endfor %}<|im_end|>"
)
"""As many models have it: a content that is a text is shown as nothing."""
PATCHES = 16
"""Image tokens of an image of the Llava."""


def build_seeing(folder: Path, kind: str = "llava", *, tok: Any = None) -> Any:
    """Build a model of this kind, save it with its processor (around the tokenizer `tok`) into `folder`, return it."""
    torch.manual_seed(0)
    tok = tokenizer() if tok is None else tok
    own = {"llava": [IMAGE], "idefics3": [IMAGE, "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]}[
        kind
    ]
    tok.add_special_tokens({"additional_special_tokens": own})
    model, processor = {"llava": _llava, "idefics3": _idefics3}[kind](tok)
    model.eval().save_pretrained(folder)
    processor.save_pretrained(folder)
    return model


def _llava(tok: Any) -> tuple[Any, Any]:
    sight = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8,
        initializer_range=0.2,
    )  # fmt: skip
    text: Any = config("qwen3", len(tok))
    text.max_position_embeddings = 2048
    shape = LlavaConfig(
        vision_config=sight,
        text_config=text,
        image_token_id=tok.convert_tokens_to_ids(IMAGE),
        vision_feature_layer=-1,
        image_seq_length=PATCHES,
        tie_word_embeddings=True,
        eos_token_id=2,
        initializer_range=0.2,
    )
    size = {"height": 32, "width": 32}
    sized = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=size)
    processor = LlavaProcessor(
        sized, tok, patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )  # fmt: skip
    return LlavaForConditionalGeneration(shape), processor


def _idefics3(tok: Any) -> tuple[Any, Any]:
    sight = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
        "patch_size": 4, "initializer_range": 0.2,
    }  # fmt: skip
    text: Any = config("llama", len(tok))
    text.max_position_embeddings = 2048
    shape = Idefics3Config(
        vision_config=sight, text_config=text, scale_factor=2, image_token_id=tok.convert_tokens_to_ids(IMAGE),
        pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    sized = Idefics3ImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    processor = Idefics3Processor(sized, tok, image_seq_len=4, chat_template=PARTS_ONLY)
    return Idefics3ForConditionalGeneration(shape), processor


def build_rows_and_columns() -> tuple[Any, ImageInputs]:
    """A model whose images have positions by row and column, and its processor without the part for videos."""
    torch.manual_seed(0)
    tok = tokenizer()
    marks = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    tok.add_special_tokens({"additional_special_tokens": marks})
    image, video, start, end = map(tok.convert_tokens_to_ids, marks)
    sight = {
        "depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3,
    }  # fmt: skip
    text = {
        "vocab_size": len(tok), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.15,
        "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
    }  # fmt: skip
    shape = Qwen2VLConfig(
        vision_config=sight, text_config=text, image_token_id=image, video_token_id=video, vision_start_token_id=start,
        vision_end_token_id=end,
    )  # fmt: skip
    model = Qwen2VLForConditionalGeneration(shape).eval()
    processor = Qwen2VLProcessor.__new__(Qwen2VLProcessor)
    processor.image_processor = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 64, "longest_edge": 4096}
    )
    processor.tokenizer, processor.chat_template = tok, None
    processor.image_token, processor.image_token_id = marks[0], image
    processor.video_token, processor.video_token_id = marks[1], video
    images = ImageInputs("")
    images._loaded = processor
    return model, images
