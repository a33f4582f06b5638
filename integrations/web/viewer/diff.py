"""The page that compares two candidates of a call."""

from __future__ import annotations

import re
from collections.abc import Iterable
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
"""Most words of a candidate for a comparison by words. Longer candidates are compared line by line."""


class Piece(msgspec.Struct, frozen=True):
    """A stretch of a text; `kind` is same, removed or added."""

    kind: str
    text: str


def diff_page(viewer: Viewer, request: Request) -> Response:
    """The page of two candidates, `a` and `b`, with their differences.

    Without `b`, `a` is compared with the chosen candidate of its call, or with another one if `a` is the chosen one.
    """
    run = viewer.run(request)
    left_id = request.query_params.get("a", "")
    right_id = request.query_params.get("b", "")
    left_call = _call_of(run, left_id)
    calls = {left_call.id: left_call}
    if right_id:
        right_call = _call_of(run, right_id)
        calls[right_call.id] = right_call
    groups = viewer.groups_of(run, ended_episode(run, left_call.episode))
    candidates: dict[str, ShownCandidate] = {}
    for call in show_calls(run, list(calls.values()), groups, whole=True):
        candidates.update({candidate.id: candidate for candidate in call.candidates})

    if left_id not in candidates or (right_id and right_id not in candidates):
        raise HTTPException(404, "There is no such candidate.")
    left = candidates[left_id]
    right = candidates[right_id] if right_id else _other_candidate(left, candidates.values())
    left_text = _text(left)
    right_text = _text(right) if right else ""
    return viewer.page(
        request,
        "diff.html",
        run,
        pair=[left, right],
        calls=calls,
        candidates=list(candidates.values()),
        sides=diff(left_text, right_text) if right else ([], []),
        same=left_text == right_text,
    )


def _other_candidate(left: ShownCandidate, candidates: Iterable[ShownCandidate]) -> ShownCandidate | None:
    """The candidate to compare `left` with if the reader names none: the chosen one, or else the first other one."""
    others = [candidate for candidate in candidates if candidate.id != left.id]
    for candidate in others:
        if candidate.chosen:
            return candidate
    return others[0] if others else None


def diff(first: str, second: str) -> tuple[list[Piece], list[Piece]]:
    """The pieces of two texts. A piece is in both (same), only in the first (removed) or only in the second (added)."""
    first_words = re.findall(r"\w+|\s+|[^\w\s]", first)
    second_words = re.findall(r"\w+|\s+|[^\w\s]", second)
    if max(len(first_words), len(second_words)) > MOST_WORDS:
        # Lines instead of words, as comparing so many words would take too long.
        first_words = first.splitlines(keepends=True)
        second_words = second.splitlines(keepends=True)
    first_pieces: list[Piece] = []
    second_pieces: list[Piece] = []
    # The heuristic for frequent words saves time on long texts, but makes the result worse.
    matcher = SequenceMatcher(None, first_words, second_words, autojunk=len(first_words) > 2000)
    for kind, first_start, first_end, second_start, second_end in matcher.get_opcodes():
        is_same = kind == "equal"
        in_first = "".join(first_words[first_start:first_end])
        in_second = "".join(second_words[second_start:second_end])
        if in_first:
            first_pieces.append(Piece("same" if is_same else "removed", in_first))
        if in_second:
            second_pieces.append(Piece("same" if is_same else "added", in_second))
    return first_pieces, second_pieces


def _call_of(run: OpenedRun, candidate: str) -> CallRecord:
    try:
        return run.figures.call(candidate.rpartition(".")[0])
    except RecordError:
        raise HTTPException(404, f"There is no candidate {candidate[:100]} in {run.name}.") from None


def _text(candidate: ShownCandidate) -> str:
    """The whole text of a candidate, with its reasoning and its named tool calls."""
    lines: list[str] = []
    for part in candidate.message.parts:
        # An empty part still takes a line, so that a comparison shows it.
        lines.append("\n".join(filter(None, (part.label, part.text))))
    return "\n".join(lines)
