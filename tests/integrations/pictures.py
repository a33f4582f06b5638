"""Small pictures, and messages that hold them."""

from __future__ import annotations

import base64
import io
from typing import Any

from PIL import Image


def picture(colour: str = "red", size: int = 8, kind: str = "PNG") -> bytes:
    """A picture of one colour."""
    file = io.BytesIO()
    Image.new("RGB", (size, size), colour).save(file, kind)
    return file.getvalue()


def url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(data)}}


def asks(text: str, *pictures: bytes) -> dict[str, Any]:
    """A user's message with these pictures before its text."""
    return {"role": "user", "content": [*map(part, pictures), {"type": "text", "text": text}]}
