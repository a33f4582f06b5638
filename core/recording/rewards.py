"""Rewards as records, with the text beside them."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

from cotune.recording.redaction import Redaction
from cotune.records.answers import clean
from cotune.records.structs import FeedbackRecord, RewardRecord

LONGEST_FEEDBACK = 4000
"""Characters of a text that are kept: half of them from its beginning and half from its end, as the error of a test or
of a compiler may stand at either."""
_MARK = re.compile(r"\n\[\.\.\. ([\d,]+) characters cut \.\.\.\]\n")


def reward_records(
    target: str, rewards: Mapping[str, float], text: str = "", name: str = "", *, redaction: Redaction | None = None
) -> list[RewardRecord | FeedbackRecord]:
    """The rewards of an episode or a candidate, given now, and the text beside them, unless it is blank. Without
    rewards the text has `name`, or the one that a plain number would have."""
    now = time.time()
    records: list[RewardRecord | FeedbackRecord] = [RewardRecord(target, *named, now) for named in rewards.items()]
    text = str(clean(text)).strip() if text else ""
    if text and redaction is not None:  # before it is cut: a half of what a redactor looks for could pass it
        text = (redaction.text(text, "feedback") or "").strip()
    if text:
        name = next(iter(rewards), name or ("local" if "." in target else "team"))
        records.append(feedback_record(target, name, text, now))
    return records


def feedback_record(target: str, name: str, text: str, at: float) -> FeedbackRecord:
    """The text beside a reward that is given at the same time, without its middle where it is too long."""
    half = LONGEST_FEEDBACK // 2
    if earlier := _MARK.fullmatch(text[half:-half]):  # an exported text, which comes in again
        return FeedbackRecord(target, name, text, at, int(earlier[1].replace(",", "")))
    text, cut = without_middle(text, LONGEST_FEEDBACK)
    return FeedbackRecord(target, name, text, at, cut)


def without_middle(text: str, most: int) -> tuple[str, int]:
    """A text without its middle where it has more than `most` characters, and how many were left out."""
    half, cut = most // 2, max(0, len(text) - most)
    return (f"{text[:half]}\n[... {cut:,} characters cut ...]\n{text[-half:]}" if cut else text), cut
