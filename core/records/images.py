"""Images in chat messages: their bytes, stored once under their hash, and the references that replace them.

An image comes as a data URL in a content part `{"type": "image_url", "image_url": {"url": ...}}`. In a stored message,
`data:image/png;base64,...` becomes `data:image/png;sha256,<hash of the bytes>`. The rest of the part is unchanged.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from cotune.errors import RequestRefused

_DATA = re.compile(r"data:(image/[\w.+-]+)(;[\w.+=-]+)*;base64,", re.ASCII | re.I)
_REFERENCE = re.compile(r"data:(image/[\w.+-]+);sha256,([0-9a-f]{64})", re.ASCII)


class Image(NamedTuple):
    """An image: its media type, as the sender names it, and its encoded bytes (PNG, JPEG, ...)."""

    media_type: str
    data: bytes

    @property
    def id(self) -> str:
        """Content address: SHA-256 of the bytes, 64 hex digits."""
        return image_id(self.data)


def image_id(data: bytes) -> str:
    """Content address of encoded bytes: SHA-256, 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def split_images(body: Any) -> tuple[Any, list[Image]]:
    """Take the images out of a message, so that each is stored once, however many messages show it. Returns the message
    with a reference in the place of each image, and the images.

    If `join_images` could not restore the URL of an image exactly (base64 with line breaks), the image stays in the
    message as well.
    """
    if type(body) is not dict or type(body.get("content")) is not list:
        return body, []
    images: list[Image] = []

    def to_reference(url: str) -> str:
        image = decoded_image(url)
        if image is None:
            return url
        images.append(image)
        return f"data:{image.media_type};sha256,{image.id}" if data_url(image) == url else url

    content = [_change_url(part, to_reference) for part in body["content"]]
    return ({**body, "content": content}, images) if images else (body, [])


def join_images(body: Any, image: Callable[[str], bytes | None]) -> Any:
    """Put the images back into a stored message, as they were sent. `image` returns the bytes for a hash.

    The reference to a lost image, for which it returns None, stays in the message.
    """
    if type(body) is not dict or type(body.get("content")) is not list:
        return body

    def restored_url(url: str) -> str:
        reference = _REFERENCE.fullmatch(url)
        if reference is None:
            return url
        data = image(reference[2])
        return url if data is None else data_url(Image(reference[1], data))

    return {**body, "content": [_change_url(part, restored_url) for part in body["content"]]}


def holds_images(messages: Iterable[Any]) -> bool:
    """Whether any message has an image part."""
    return any(True for message in messages for _ in _image_urls(message))


def images_of(messages: Iterable[Any]) -> tuple[bytes, ...]:
    """The encoded bytes of all images of a request, in order. Raises RequestRefused for an image that is not part of
    the request: cotune never downloads one."""
    images: list[bytes] = []
    for message in messages:
        for url in _image_urls(message):
            image = decoded_image(url)
            if image is None:
                scheme = "no address"
                if isinstance(url, str) and ":" in url:
                    scheme = url.partition(":")[0][:20]
                raise RequestRefused(
                    f"An image comes as {scheme!r} and not with its bytes; a policy fetches nothing.",
                    "Send it as data:image/png;base64,... (or jpeg, webp, gif).",
                )
            images.append(image.data)
    return tuple(images)


def data_url(image: Image) -> str:
    """The data URL of the image."""
    return f"data:{image.media_type};base64,{base64.b64encode(image.data).decode()}"


def shown_image(url: str) -> str:
    """A phrase for an image in a text: its type, size and the beginning of its hash, or its address."""
    image = decoded_image(url)
    if image is not None:
        return f"[{image.media_type}, {len(image.data):,} bytes, sha256 {image.id[:12]}]"
    reference = _REFERENCE.fullmatch(url)
    if reference is not None:  # the store no longer has the image
        return f"[{reference[1]}, sha256 {reference[2][:12]}, lost]"
    return f"[image at {url[:200]}]"


def without_image_bytes(body: Any) -> Any:
    """A message for people to read, with phrases (`shown_image`) in place of the addresses of images."""
    if not isinstance(body, Mapping) or type(body.get("content")) is not list:
        return body
    return {**body, "content": [_change_url(part, shown_image) for part in body["content"]]}


def content_text(content: Any) -> str:
    """Content in parts as text for people to read: its texts, and a phrase for each image."""
    if not isinstance(content, list):
        return "" if content is None else str(content)
    return "\n".join(_part_text(part) for part in content)


def _part_text(part: Any) -> str:
    """A part of a message's content as text: a phrase for an image, else its text."""
    url = _url(part)
    if isinstance(url, str):
        return shown_image(url)
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    return str(part)


def decoded_image(url: Any) -> Image | None:
    """The image of a data URL; None for anything else."""
    match = _DATA.match(url) if isinstance(url, str) else None
    if match is None:
        return None
    encoded = "".join(url[match.end() :].split())  # senders may break it into lines
    try:
        return Image(match[1], base64.b64decode(encoded, validate=True))
    except (binascii.Error, ValueError):  # not base64
        return None


def _image_urls(message: Any) -> Iterator[Any]:
    """The addresses of the images in a message."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple):
        return
    for part in content:
        if isinstance(part, Mapping) and part.get("type") == "image_url":
            yield _url(part)


def _url(part: Any) -> Any:
    """The address in an image part. In OpenAI form it is in an object; some clients send it as a text."""
    image = part.get("image_url") if isinstance(part, Mapping) else None
    return image.get("url") if isinstance(image, Mapping) else image


def _change_url(part: Any, change: Callable[[str], str]) -> Any:
    """A part of a message's content with another address of its image; `part` itself if nothing changes."""
    url = _url(part)
    if not isinstance(url, str):
        return part
    new_url = change(url)
    if new_url == url:
        return part
    image = part["image_url"]
    if isinstance(image, Mapping):
        return {**part, "image_url": {**image, "url": new_url}}
    return {**part, "image_url": new_url}


def prompt_id(prompt: str, images: Sequence[str]) -> str:
    """The identity of a prompt: the id of its token path, and the ids of the images for its placeholders."""
    return "+".join((prompt, *images))
