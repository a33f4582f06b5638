"""Prompts with images in vLLM's form: the unchanged token ids, and the range of each image among them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

from cotune.errors import RequestRefused, error_line
from cotune.integrations.models.folder.vision import opened_image

_REMEDY = 'Sample in process, with engine = "transformers".'


async def image_prompt(renderer: Any, token_ids: Sequence[int], images: Sequence[bytes]) -> Any:
    """Make vLLM's `MultiModalInput` of a prompt with these encoded images, which are in the order of their tokens.

    vLLM's processor receives the images with a text that contains nothing else. The tokens that it makes for each
    image are then searched in the prompt. `renderer` belongs to vLLM's `AsyncLLM`. Raises RequestRefused for images
    that cannot be read, that vLLM refuses, or whose tokens are not in the prompt.
    """
    from vllm.inputs.engine import mm_input

    opened = await asyncio.to_thread(lambda: [opened_image(image) for image in images])
    try:
        text = renderer.get_mm_processor().dummy_inputs.get_dummy_text({"image": len(opened)})
        # Without the cache: vLLM would record these images as sent to its engine, even if the prompt is refused below.
        (processed,) = await renderer.render_cmpl_async(
            [{"prompt": text, "multi_modal_data": {"image": opened}}], skip_mm_cache=True
        )
    except (ValueError, TypeError, RuntimeError) as error:
        raise RequestRefused(f"vLLM refuses the images: {error_line(error)}.", _REMEDY) from None
    ranges = _moved_ranges(list(token_ids), processed["prompt_token_ids"], processed["mm_placeholders"]["image"])
    return mm_input(list(token_ids), processed["mm_kwargs"], processed["mm_hashes"], {"image": ranges})


def _moved_ranges(prompt: list[int], image_text: list[int], ranges: Sequence[Any]) -> list[Any]:
    """Move vLLM's ranges in the text of images to the positions of the same tokens in the prompt.

    `image_text` are the token ids of a text with nothing but the images, and each of the `ranges` belongs to an image.
    """
    moved: list[Any] = []
    replaced_tokens: list[int] = []  # tokens whose embeddings the model replaces with embeddings of the images
    start = 0
    for range_ in ranges:
        tokens = image_text[range_.offset : range_.offset + range_.length]
        for token, is_replaced in zip(tokens, _replaced_tokens(range_), strict=True):
            if is_replaced:
                replaced_tokens.append(token)
        later_positions = range(start, len(prompt))
        offset = next((i for i in later_positions if prompt[i : i + len(tokens)] == tokens), None)
        if offset is None:
            raise RequestRefused(
                f"vLLM makes {len(tokens)} tokens of image {len(moved)}, which the prompt does not hold.", _REMEDY
            )
        moved.append(dataclasses.replace(range_, offset=offset))
        start = offset + len(tokens)

    # A prompt with more image tokens than its images take would be computed without an image at some of them.
    image_token_ids = set(replaced_tokens)
    count = sum(token in image_token_ids for token in prompt)
    if count != len(replaced_tokens):
        raise RequestRefused(f"The prompt has {count} image tokens; its images take {len(replaced_tokens)}.", _REMEDY)
    return moved


def _replaced_tokens(range_: Any) -> list[bool]:
    """For each token of a range, whether the model replaces its embedding with one of the image."""
    if range_.is_embed is None:
        return [True] * range_.length
    return [bool(flag) for flag in range_.is_embed.tolist()]
