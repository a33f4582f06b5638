"""Prompts with images as vLLM takes them: their token ids as they are, and where among them each image stands."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

from cotune.errors import RequestRefused, error_line
from cotune.integrations.models.folder.vision import opened_image

_REMEDY = 'Sample in process, with engine = "transformers".'


async def image_prompt(renderer: Any, token_ids: Sequence[int], images: Sequence[bytes]) -> Any:
    """vLLM's `MultiModalInput` of a prompt whose image tokens stand for these encoded images, in order.

    vLLM's processor is given the images with a text of nothing else, and what it puts in the place of each is found in
    the prompt. `renderer` is that of its `AsyncLLM`. Raises RequestRefused for images that cannot be read, that vLLM
    refuses, or whose tokens are not those of the prompt.
    """
    from vllm.inputs.engine import mm_input

    opened = await asyncio.to_thread(lambda: [opened_image(image) for image in images])
    try:
        text = renderer.get_mm_processor().dummy_inputs.get_dummy_text({"image": len(opened)})
        # Past vLLM's record of what its engine holds, where a prompt that is refused below would be missed.
        (made,) = await renderer.render_cmpl_async(
            [{"prompt": text, "multi_modal_data": {"image": opened}}], skip_mm_cache=True
        )
    except (ValueError, TypeError, RuntimeError) as error:
        raise RequestRefused(f"vLLM refuses the images: {error_line(error)}.", _REMEDY) from None
    places = _places(list(token_ids), made["prompt_token_ids"], made["mm_placeholders"]["image"])
    return mm_input(list(token_ids), made["mm_kwargs"], made["mm_hashes"], {"image": places})


def _places(prompt: list[int], made: list[int], ranges: Sequence[Any]) -> list[Any]:
    """vLLM's ranges of a text of images, moved to where the same tokens stand in the prompt."""
    moved: list[Any] = []
    seen: set[int] = set()
    at = 0
    for range_ in ranges:
        tokens = made[range_.offset : range_.offset + range_.length]
        seen |= {token for token, is_seen in zip(tokens, _embedded(range_), strict=True) if is_seen}
        at = next((i for i in range(at, len(prompt)) if prompt[i : i + len(tokens)] == tokens), -1)
        if at < 0:
            raise RequestRefused(
                f"vLLM makes {len(tokens)} tokens of image {len(moved)}, which the prompt does not hold.", _REMEDY
            )
        moved.append(dataclasses.replace(range_, offset=at))
        at += len(tokens)
    places, needed = sum(token in seen for token in prompt), sum(sum(_embedded(range_)) for range_ in moved)
    if places != needed:
        raise RequestRefused(f"The prompt has {places} image tokens; its images take {needed}.", _REMEDY)
    return moved


def _embedded(range_: Any) -> list[bool]:
    """Which tokens of a range the model puts what it sees in the place of."""
    return [True] * range_.length if range_.is_embed is None else [bool(one) for one in range_.is_embed.tolist()]
