"""What the learner saw of each token of a step in the first pass of the update, in files of the run folder."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cotune.storage.whole_file import whole_file

FOLDER = "tokens"
"""Folder of these files in a run folder: step-000012.npz, with the arrays `ids`, `lengths`, `gaps`, `entropies`."""


class Seen(NamedTuple):
    """Of a candidate's tokens, both [tokens], float16, in nats: log pi_learner - log pi_sampler, and the entropy of the
    learner's distribution. Not a number where no pass computed a token."""

    gaps: npt.NDArray[np.float16]
    entropies: npt.NDArray[np.float16]


class TokenFigures:
    """The figures of a step, by candidate."""

    def __init__(self, found: Mapping[str, Seen]) -> None:
        self._found = found

    def of(self, candidate: str) -> Seen | None:
        """Those of a candidate's tokens; None where no pass computed it."""
        return self._found.get(candidate)


def file_of(run: Path, step: int) -> Path:
    """The file of a training step, which counts from 0; its name counts from 1."""
    return run / FOLDER / f"step-{step + 1:06d}.npz"


def write_token_figures(run: Path, step: int, found: Mapping[str, Seen]) -> None:
    """Write the figures of a step, by candidate."""
    if not found:
        return
    file = file_of(run, step)
    file.parent.mkdir(exist_ok=True)
    with whole_file(file) as out:
        np.savez_compressed(
            out,
            ids=np.array(list(found)),
            lengths=np.array([len(one.gaps) for one in found.values()], np.int32),
            gaps=np.concatenate([one.gaps for one in found.values()]).astype(np.float16),
            entropies=np.concatenate([one.entropies for one in found.values()]).astype(np.float16),
        )


def read_token_figures(run: Path, step: int, later: int = 0) -> TokenFigures | None:
    """The figures of a step and of so many `later` ones, in which its candidates may have been trained on; None where
    there are none or they cannot be read."""
    found: dict[str, Seen] = {}
    for file in (file_of(run, one) for one in range(step, step + later + 1)):
        try:
            with np.load(file, allow_pickle=False) as stored:
                ends = np.cumsum(stored["lengths"])[:-1]
                parts = zip(np.split(stored["gaps"], ends), np.split(stored["entropies"], ends), strict=True)
                found |= {str(id): Seen(*one) for id, one in zip(stored["ids"], parts, strict=True)}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            continue
    return TokenFigures(found) if found else None
