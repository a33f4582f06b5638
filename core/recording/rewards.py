"""Records of rewards, and of the feedback given with them."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

from cotune.recording.redaction import Redaction
from cotune.records.answers import clean
from cotune.records.structs import FeedbackRecord, RewardRecord

LONGEST_FEEDBACK = 4000
"""Maximum length of feedback, in characters. A longer text loses its middle: the error of a test or a compiler may be
at its beginning or its end."""
_MARK = re.compile(r"\n\[\.\.\. ([\d,]+) characters cut \.\.\.\]\n")


def reward_records(
    target: str, rewards: Mapping[str, float], text: str = "", name: str = "", *, redaction: Redaction | None = None
) -> list[RewardRecord | FeedbackRecord]:
    """The records of rewards for an episode or a candidate, with the present time, and of their feedback `text` unless
    it is blank.

    `target` is the id of the episode or the candidate. The feedback has the name of the first reward. Without rewards
    it has `name`, or if that is empty the name of a reward that is a plain number: "local" or "team".
    """
    present = time.time()
    records: list[RewardRecord | FeedbackRecord] = []
    for component, value in rewards.items():
        records.append(RewardRecord(target, component, value, present))
    stored_text = str(clean(text)).strip() if text else ""
    if stored_text and redaction is not None:  # before the text is cut: a cut could hide a secret from the redactor
        stored_text = (redaction.text(stored_text, "feedback") or "").strip()
    if stored_text:
        text_name = next(iter(rewards), name)  # the name of the first reward, if there is one
        if not text_name:
            is_candidate = "." in target  # `candidate_id` joins a call's id and an index with a dot
            text_name = "local" if is_candidate else "team"
        records.append(feedback_record(target, text_name, stored_text, present))
    return records


def feedback_record(target: str, name: str, text: str, at: float) -> FeedbackRecord:
    """The feedback of a reward given at the time `at`, without its middle if it is too long."""
    half = LONGEST_FEEDBACK // 2
    if earlier := _MARK.fullmatch(text[half:-half]):  # the text was cut before, and is imported again
        return FeedbackRecord(target, name, text, at, int(earlier[1].replace(",", "")))
    text, cut = without_middle(text, LONGEST_FEEDBACK)
    return FeedbackRecord(target, name, text, at, cut)


def without_middle(text: str, most: int) -> tuple[str, int]:
    """A text, without its middle if it has more than `most` characters, and the number of characters left out."""
    half = most // 2
    cut = max(0, len(text) - most)
    if cut:
        text = f"{text[:half]}\n[... {cut:,} characters cut ...]\n{text[-half:]}"
    return text, cut
