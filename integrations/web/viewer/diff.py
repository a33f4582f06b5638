"""Two candidates of a call as a diff."""

from __future__ import annotations

import re
from difflib import SequenceMatcher

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from cotune.errors import RecordError
from cotune.integrations.web.viewer.episode import ShownCandidate, ended_episode, show_calls
from cotune.integrations.web.viewer.viewer import Viewer
from cotune.reading.run import OpenedRun
from cotune.records.structs import CallRecord

MOST_WORDS = 20_000
"""Words of a candidate that are compared; longer ones are compared line by line."""


class Piece(msgspec.Struct, frozen=True):
    """A stretch of a text; `kind` is same, removed or added."""

    kind: str
    text: str


def diff_page(viewer: Viewer, request: Request) -> Response:
    """Two candidates: what the second says that the first does not. Without a second one, the chosen one of the same
    call, or another one."""
    run, asked = viewer.run(request), request.query_params
    first = _call_of(run, asked.get("a", ""))
    second = _call_of(run, asked["b"]) if asked.get("b") else first
    calls = {call.id: call for call in (first, second)}
    groups = viewer.groups_of(run, ended_episode(run, first.episode))
    shown = show_calls(run, list(calls.values()), groups, whole=True)
    candidates = {candidate.id: candidate for call in shown for candidate in call.candidates}
    others = [one for one in candidates.values() if one.id != asked["a"]]
    chosen = next((one.id for one in others if one.chosen), others[0].id if others else "")
    pair = [candidates.get(asked["a"]), candidates.get(asked.get("b") or chosen)]
    if pair[0] is None or (asked.get("b") and pair[1] is None):
        raise HTTPException(404, "There is no such candidate.")
    texts = [_text(one) if one else "" for one in pair]
    return viewer.page(
        request,
        "diff.html",
        run,
        pair=pair,
        calls=calls,
        candidates=list(candidates.values()),
        sides=diff(*texts) if pair[1] else ([], []),
        same=texts[0] == texts[1],
    )


def diff(first: str, second: str) -> tuple[list[Piece], list[Piece]]:
    """Two texts in pieces: what both have, what only the first has (removed), and what only the second has (added)."""
    parts: list[list[str]] = [re.findall(r"\w+|\s+|[^\w\s]", text) for text in (first, second)]
    if max(map(len, parts)) > MOST_WORDS:
        parts = [text.splitlines(keepends=True) for text in (first, second)]
    left: list[Piece] = []
    right: list[Piece] = []
    for kind, i, j, k, m in SequenceMatcher(None, parts[0], parts[1], autojunk=len(parts[0]) > 2000).get_opcodes():
        for pieces, name, words in ((left, "removed", parts[0][i:j]), (right, "added", parts[1][k:m])):
            if words:
                pieces.append(Piece("same" if kind == "equal" else name, "".join(words)))
    return left, right


def _call_of(run: OpenedRun, candidate: str) -> CallRecord:
    try:
        return run.figures.call(candidate.rpartition(".")[0])
    except RecordError:
        raise HTTPException(404, f"There is no candidate {candidate[:100]} in {run.name}.") from None


def _text(candidate: ShownCandidate) -> str:
    """All that a candidate says, its reasoning and its tool calls with their names."""
    return "\n".join("\n".join(filter(None, (part.label, part.text))) for part in candidate.message.parts)
