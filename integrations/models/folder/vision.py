"""Prepares images for a model that sees them, with the model's own processor."""

from __future__ import annotations

import inspect
import io
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from cotune.errors import ConfigError, RequestRefused, error_line
from cotune.integrations.models.folder.folder import errors_of_model, loading_options
from cotune.runtime.bounded_cache import BoundedCache

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Accepted formats of images. Pillow reads others too, some by external programs."""
KEPT = 256
KEPT_BYTES = 256 << 20
"""Limits of the cache of processed images: their number, and bytes of all of them."""
PASS_BYTES = 32 << 20
"""Most bytes of image inputs for sequences that go through a network together."""
_TEXT = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}
"""Outputs of a processor for the text. They are not used, because the text has its token ids already."""


class ImageInputs:
    """The inputs of a model for images. The model's processor is loaded with the first image.

    Safe to use from several threads.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._loaded: Any = None
        self._inputs: BoundedCache[dict[str, Any]] = BoundedCache(KEPT, KEPT_BYTES)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that stand for images, and for videos if the model knows them."""
        processor = self._processor()
        ids = [*_placeholder_ids(processor), getattr(processor, "video_token_id", None)]
        return tuple(dict.fromkeys(id for id in ids if id is not None))

    def expanded(self, text: str, images: Sequence[bytes]) -> str:
        """A rendered prompt in which each image mark is replaced by the image's tokens. Raises RequestRefused."""
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
        """The image inputs of a forward pass over one sequence, on the network's device: pixel values, and others.

        In `token_ids`, the ids of the sequence, image tokens stand for the images. Raises RequestRefused if there are
        more or fewer of them than the images need.
        """
        import torch

        from cotune.integrations.models.device_copies import to_device

        inputs = self._processed(tuple(images))
        placeholders = _placeholder_ids(self._processor())
        is_image = [int(id in placeholders) for id in token_ids]
        n_placeholders = sum(is_image)
        n_needed = sum(id in placeholders for id in inputs["input_ids"][0].tolist())
        if n_placeholders != n_needed:
            raise RequestRefused(f"The prompt has {n_placeholders} image tokens; its images take {n_needed}.", _CHECK)

        pass_inputs = {}
        for name, value in inputs.items():
            if name not in _TEXT:
                pass_inputs[name] = to_device(value, network.device) if torch.is_tensor(value) else value
        # Some networks also take a flag for each token: whether it stands for an image.
        parameters = inspect.signature(network.base_model.forward).parameters
        for name in parameters.keys() & {"token_type_ids", "mm_token_type_ids"}:
            pass_inputs[name] = to_device(torch.tensor([is_image]), network.device)
        return pass_inputs

    def _processed(self, images: tuple[bytes, ...]) -> dict[str, Any]:
        """The outputs of the model's processor for these images, and for a text with nothing but their marks."""
        inputs = self._inputs.get(images)
        if inputs is None:
            processor = self._processor()
            opened = [opened_image(image) for image in images]
            text = processor.image_token * len(images)
            inputs = dict(processor(text=[text], images=opened, add_special_tokens=False, return_tensors="pt"))
            self._inputs.put(images, inputs, sum(_bytes(value) for value in inputs.values()))
        return inputs

    def together(
        self, network: Any, sequences: Sequence[tuple[Sequence[int], Sequence[bytes]]]
    ) -> Iterator[tuple[list[int], dict[str, Any]]]:
        """Divide sequences, each with token ids and images, into passes that compute several of them at once.

        Sequences share a pass if they have the same length and images of the same form, up to PASS_BYTES. Yields, for
        each pass, the numbers of its sequences (their positions in `sequences`), and its image inputs as in `of`.
        Raises RequestRefused.
        """
        import torch

        inputs_of_sequence: list[dict[str, Any]] = []
        # By length and form of the inputs: passes, each a list of numbers of sequences. The last pass may get more.
        passes_of_form: dict[Any, list[list[int]]] = {}
        for number, (token_ids, images) in enumerate(sequences):
            inputs = self.of(network, token_ids, images)
            inputs_of_sequence.append(inputs)
            if all(map(torch.is_tensor, inputs.values())):
                form: Any = tuple((name, value.dtype, value.shape[1:]) for name, value in inputs.items())
            else:
                form = number  # inputs that are no tensors cannot be stacked: the sequence has a pass of its own
            passes = passes_of_form.setdefault((len(token_ids), form), [[]])
            # Inputs of one form have equal sizes.
            bytes_with_this = (len(passes[-1]) + 1) * sum(map(_bytes, inputs.values()))
            if passes[-1] and bytes_with_this > PASS_BYTES:
                passes.append([])
            passes[-1].append(number)

        for passes in passes_of_form.values():
            for numbers in passes:
                inputs = inputs_of_sequence[numbers[0]]
                if len(numbers) > 1:
                    stacked = {}
                    for name in inputs:
                        stacked[name] = torch.cat([inputs_of_sequence[number][name] for number in numbers])
                    inputs = stacked
                yield numbers, inputs

    def _processor(self) -> Any:
        """The model's processor, loaded at the first image. Raises ConfigError if it needs a package that is
        missing.
        """
        with self._lock:
            if self._loaded is None:
                from transformers import AutoProcessor

                try:
                    with errors_of_model(self._model):
                        self._loaded = AutoProcessor.from_pretrained(self._model, **loading_options())
                except ImportError as error:
                    fault = f"has a processor that cannot be loaded ({error_line(error)})"
                    raise ConfigError("model", self._model, fault, "Install what its processor needs.") from None
            return self._loaded


def opened_image(data: bytes) -> Any:
    """The image as an RGB image of Pillow. Raises RequestRefused."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return image.convert("RGB")
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError, SyntaxError) as error:
        kinds = ", ".join(FORMATS)
        raise RequestRefused(
            f"An image of {len(data):,} bytes cannot be read: {error_line(error)}.", f"Send {kinds}."
        ) from None


def _placeholder_ids(processor: Any) -> list[int]:
    """Ids of the tokens that a model replaces by its image features."""
    return list(getattr(processor, "image_token_ids", None) or [processor.image_token_id])


def _bytes(value: Any) -> int:
    return int(value.nbytes) if hasattr(value, "nbytes") else 64


_CHECK = "Check that they are images that the model takes."
