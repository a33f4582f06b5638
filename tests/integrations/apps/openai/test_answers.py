"""Bodies of providers as the end of a call: whole, cut short, broken in themselves, and telling of a failure."""

from __future__ import annotations

import msgspec
import pytest

from cotune.integrations.apps.openai.forms import FORMS, end_with_body, part_of
from cotune.recording.model_calls import open_call
from tests.integrations.provider import completion, event
from tests.integrations.recorded import Recorded

CHAT, RESPONSES = FORMS
WHOLE = msgspec.json.encode(completion({"role": "assistant", "content": "hello"}))
STREAM = event({"content": "hel"}) + event({"content": "lo"}) + event({}, "stop") + b"data: [DONE]\n\n"
FAILED = b'{"status": "failed", "error": {"code": "server_error", "message": "no luck"}, "output": []}'


@pytest.mark.parametrize(
    ("form", "raw", "streamed", "ends", "said"),
    [
        (CHAT, WHOLE, False, "ok", "hello"),
        (CHAT, STREAM, True, "ok", "hello"),
        (CHAT, WHOLE[:-5], False, None, None),
        (CHAT, STREAM[:40], True, None, None),
        (CHAT, b"<html>", False, "malformed", None),
        (CHAT, b'{"choices": []}', False, "malformed", None),
        (CHAT, b"[" * 100_000, False, "malformed", None),
        (CHAT, event({"content": "hel"}) + b"data: <html>\n\n", True, "malformed", "hel"),
        (RESPONSES, FAILED, False, "error", None),
    ],
)
def test_a_body_ends_the_call_unless_it_is_cut_short(form, raw, streamed, ends, said) -> None:
    record = Recorded()

    def run(task):
        call = open_call(lambda: {"messages": [{"role": "user", "content": "x"}], "stream": streamed})
        assert end_with_body(call, form, {}, raw, streamed) is (ends is not None)
        assert call.ended is (ends is not None)
        return 1

    record(run)
    (call,) = record.calls
    assert call.status == (ends or "cancelled")
    assert [c.text for c in call.candidates] == ([said] if said else [])


def test_a_part_of_a_stream_tells_what_was_said_so_far() -> None:
    found = part_of(CHAT, STREAM[: len(event({"content": "hel"}))], True)
    assert found is not None and found.candidates[0].text == "hel"
    assert part_of(CHAT, WHOLE[:-5], False) is None
    assert part_of(CHAT, b"data: <html>\n\n", True) is None
