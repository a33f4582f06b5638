"""What a provider sent, as the end of a call: a whole answer, one that is broken in itself, or what there is of one."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

import msgspec

from cotune.integrations.openai.forms import Form
from cotune.integrations.openai.response_body import ProviderFailed
from cotune.recording.answers import Answer
from cotune.recording.model_calls import reason_of
from cotune.recording.recorder import LiveCall

BROKEN = (ValueError, TypeError, AttributeError, KeyError, IndexError, RecursionError, OverflowError)
"""What reading a malformed body raises."""


def finish(call: LiveCall, form: Form, asked: Mapping[str, Any], raw: bytes, streamed: bool) -> bool:
    """End the call with the body `raw`, a stream or JSON, also where it is broken in itself or tells of a failure.

    False, and the call goes on, where the body is cut short.
    """
    found = None
    try:
        body = form.stream(raw) if streamed else _decoded(raw)
        if body is None:
            return False
        found = form.answer(body)
        form.keep(call, asked, body)
    except ProviderFailed as failure:
        call.fail("error", str(failure), part_of(form, raw, streamed))
    except BROKEN as broken:
        if isinstance(broken, msgspec.DecodeError) and "truncated" in str(broken):
            return False
        call.fail("malformed", reason_of(broken)[1], found or part_of(form, raw, streamed))
    else:
        call.finish(found)
    return True


def _decoded(raw: bytes) -> Any:
    """JSON as the SDK takes it, which is more than JSON has: NaN, and surrogates that stand alone."""
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError as broken:
        if "truncated" not in str(broken):
            with contextlib.suppress(ValueError, RecursionError):
                return json.loads(raw, parse_constant=lambda name: None)
        raise


def part_of(form: Form, raw: bytes, streamed: bool) -> Answer | None:
    """The answer as far as a broken or half-read stream tells it; None for JSON, of which a part tells nothing."""
    if not streamed:
        return None
    try:
        body = form.part(raw)
        return None if body is None else form.answer(body)
    except (ProviderFailed, *BROKEN):
        return None
