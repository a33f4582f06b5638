"""What a model that sees images is given of them, made by its own processor."""

from __future__ import annotations

import inspect
import io
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from cotune.errors import ConfigError, RequestRefused, error_line
from cotune.integrations.models.folder.folder import loading, reading
from cotune.runtime.bounded_cache import BoundedCache

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Of images that a policy is given; Pillow reads others too, some by programs of their own."""
KEPT, KEPT_BYTES = 256, 256 << 20
"""Most images that are kept as their processor made them, and bytes of all of them."""
PASS_BYTES = 32 << 20
"""Most bytes of pixel values and the like that sequences take which go through a network together."""
_TEXT = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}
"""What a processor makes of the text, which has its token ids already."""


class ImageInputs:
    """What a model is given of images, made by its own processor, which is loaded with the first of them.

    Safe to use from several threads.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._loaded: Any = None
        self._made: BoundedCache[dict[str, Any]] = BoundedCache(KEPT, KEPT_BYTES)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that stand for images (and videos, where the model knows them)."""
        processor = self._processor()
        ids = [*_places(processor), getattr(processor, "video_token_id", None)]
        return tuple(dict.fromkeys(id for id in ids if id is not None))

    def expanded(self, text: str, images: Sequence[bytes]) -> str:
        """A rendered prompt with as many image tokens as each image takes. Raises RequestRefused."""
        processor = self._processor()
        mark = processor.image_token
        if text.count(mark) != len(images):
            raise RequestRefused(
                f"The chat template shows {text.count(mark)} image marks ({mark}) for {len(images)} images.",
                f"Use a model whose template shows images, and keep {mark} out of the texts of its messages.",
            )
        try:
            processed = processor(
                text=[text], images=[opened_image(image) for image in images], add_special_tokens=False
            )
        except (ValueError, TypeError, RuntimeError, OSError) as error:
            raise RequestRefused(f"The model's processor refuses the images: {error_line(error)}.", _CHECK) from None
        decoded: str = processor.tokenizer.decode(processed["input_ids"][0], skip_special_tokens=False)
        return decoded

    def of(self, network: Any, token_ids: Sequence[int], images: Sequence[bytes]) -> dict[str, Any]:
        """What a forward pass over one sequence is given beside its ids: pixel values and whatever goes with them, on
        the network's device. `token_ids` are those of the pass. Raises RequestRefused where they have other places for
        images than the images take."""
        import torch

        processor, key = self._processor(), tuple(images)
        inputs = self._made.get(key)
        if inputs is None:
            opened, text = [opened_image(image) for image in images], processor.image_token * len(images)
            inputs = dict(processor(text=[text], images=opened, add_special_tokens=False, return_tensors="pt"))
            self._made.put(key, inputs, sum(_bytes(value) for value in inputs.values()))
        marks = _places(processor)
        seen = [int(id in marks) for id in token_ids]
        places, needed = sum(seen), sum(id in marks for id in inputs["input_ids"][0].tolist())
        if places != needed:
            raise RequestRefused(f"The prompt has {places} image tokens; its images take {needed}.", _CHECK)
        of_pass = {
            name: value.to(network.device) if torch.is_tensor(value) else value
            for name, value in inputs.items()
            if name not in _TEXT
        }
        parameters = inspect.signature(network.base_model.forward).parameters
        for name in parameters.keys() & {"token_type_ids", "mm_token_type_ids"}:
            of_pass[name] = torch.tensor([seen], device=network.device)
        return of_pass

    def together(
        self, network: Any, asked: Sequence[tuple[Sequence[int], Sequence[bytes]]]
    ) -> Iterator[tuple[list[int], dict[str, Any]]]:
        """Passes over these sequences, token ids and images of each: the numbers of those that go together, being of
        one length with images of one form, and what that pass is given, as by `of`. Raises RequestRefused."""
        import torch

        alike: dict[Any, list[list[int]]] = {}
        taken: dict[int, dict[str, Any]] = {}
        for number, (token_ids, images) in enumerate(asked):
            inputs = taken[number] = self.of(network, token_ids, images)
            stacks = all(map(torch.is_tensor, inputs.values()))
            form = tuple((name, value.dtype, value.shape[1:]) for name, value in inputs.items()) if stacks else number
            passes = alike.setdefault((len(token_ids), form), [[]])
            if passes[-1] and (len(passes[-1]) + 1) * sum(map(_bytes, inputs.values())) > PASS_BYTES:
                passes.append([])
            passes[-1].append(number)
        for members in (members for passes in alike.values() for members in passes):
            first = taken[members[0]]
            joined = {name: torch.cat([taken[i][name] for i in members]) for name in first} if members[1:] else first
            yield members, joined

    def _processor(self) -> Any:
        with self._lock:
            if self._loaded is None:
                from transformers import AutoProcessor

                try:
                    with reading(self._model):
                        self._loaded = AutoProcessor.from_pretrained(self._model, **loading())
                except ImportError as error:
                    fault = f"has a processor that cannot be loaded ({error_line(error)})"
                    raise ConfigError("model", self._model, fault, "Install what its processor needs.") from None
            return self._loaded


def opened_image(data: bytes) -> Any:
    """The image as Pillow has it, in RGB. Raises RequestRefused."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return image.convert("RGB")
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError, SyntaxError) as error:
        kinds = ", ".join(FORMATS)
        raise RequestRefused(
            f"An image of {len(data):,} bytes cannot be read: {error_line(error)}.", f"Send {kinds}."
        ) from None


def _places(processor: Any) -> list[int]:
    """Ids of the tokens in whose places a model puts what it sees."""
    return list(getattr(processor, "image_token_ids", None) or [processor.image_token_id])


def _bytes(value: Any) -> int:
    return int(value.nbytes) if hasattr(value, "nbytes") else 64


_CHECK = "Check that they are images that the model takes."
