"""A step without a single row to train on: whether it is only uneventful, or a fault that stops the run, and which."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from cotune.errors import GroupError
from cotune.recording.records import Episode
from cotune.trainer.run import Run

UNEVENTFUL = (
    "no_signal", "zero_variance", "zero_advantage", "mean_out_of_range", "group_of_one", "truncated", "consumed",
)  # fmt: skip
"""Reasons to leave out sound candidates. A step that has some goes on without an update, and so does one in which
nothing went wrong at all: its trained roles had no call."""
FAULTLESS = ("untrained_role", "not_chosen")


def require_usable(run: Run, episodes: Sequence[Episode], left_out: Mapping[str, int]) -> None:
    """Raises GroupError with the commonest causes where no candidate of a step can be used because of faults."""
    faults = {reason: count for reason, count in left_out.items() if count and reason not in FAULTLESS}
    broken = [episode for episode in episodes if episode.status != "ok"]
    if any(left_out.get(reason) for reason in UNEVENTFUL) or not (faults or len(broken) == len(episodes)):
        return
    counts = ", ".join(f"{reason}: {count}" for reason, count in sorted(left_out.items()) if count)
    causes = [
        *_commonest(f"of {len(episodes)} episodes failed", (episode.error for episode in broken)),
        *_commonest("calls failed or were not scored", _call_errors(run, episodes)),
    ]
    raise GroupError(
        " ".join([f"Step {run.step + 1} has no usable sample ({counts or 'no calls at all'}).", *causes]),
        f"Put that right, then go on with --resume; see the episodes with: cotune show {run.folder.path}.",
    )


def _call_errors(run: Run, episodes: Sequence[Episode]) -> Iterable[str]:
    """What went wrong in the calls of the step, scorers included."""
    return (call.error for episode in episodes for call in run.store.calls(episode.id) if call.error)


def _commonest(what: str, errors: Iterable[str | None]) -> list[str]:
    """How many errors there are, and the text of the commonest; nothing where there is none."""
    found = Counter(error for error in errors if error)
    if not found:
        return []
    (text, count), total = found.most_common(1)[0], sum(found.values())
    often = "" if len(found) == 1 else f", {count} of them"
    return [f"{total} {what}{often} with: {text}"]
