"""Where the rows of a batch stand: sorted by the adapter that they go through."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def arrange(
    live: npt.NDArray[np.int64], live_kinds: npt.NDArray[np.int64], new_kinds: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Positions of the live rows and of the new rows in a layout without gaps, sorted by kind.

    A live row that already stands inside the range of its kind stays, so few rows move.
    """
    kinds, counts = np.unique(np.concatenate([live_kinds, new_kinds]), return_counts=True)
    slots = np.repeat(kinds, counts)
    total = len(slots)
    if not total:
        return live, live[:0]
    stays = (live < total) & (slots[np.minimum(live, total - 1)] == live_kinds)
    free = np.ones(total, bool)
    free[live[stays]] = False
    movers = np.concatenate([np.flatnonzero(~stays), len(live) + np.arange(len(new_kinds))])
    order = np.argsort(np.concatenate([live_kinds, new_kinds])[movers], kind="stable")
    to = np.concatenate([live, np.empty(len(new_kinds), live.dtype)])
    to[movers[order]] = np.flatnonzero(free)
    return to[: len(live)], to[len(live) :]
