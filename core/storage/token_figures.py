"""Figures of each token of a step, from the first pass of the learner's update, in files of the run folder."""

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


class CandidateTokens(NamedTuple):
    """Figures of a candidate's tokens, both [tokens], float16, in nats: `gaps` is log pi_learner - log pi_sampler,
    `entropies` the entropy of the learner's distribution. NaN for a token that no pass computed."""

    gaps: npt.NDArray[np.float16]
    entropies: npt.NDArray[np.float16]


class TokenFigures:
    """The figures of a step's tokens, by candidate id."""

    def __init__(self, candidates: Mapping[str, CandidateTokens]) -> None:
        self._candidates = candidates

    def of(self, candidate: str) -> CandidateTokens | None:
        """The figures of a candidate's tokens; None if no pass computed it."""
        return self._candidates.get(candidate)


def file_of(run: Path, step: int) -> Path:
    """The file of a training step. `step` counts from 0, the name of the file from 1."""
    return run / FOLDER / f"step-{step + 1:06d}.npz"


def write_token_figures(run: Path, step: int, candidates: Mapping[str, CandidateTokens]) -> None:
    """Write the figures of a step's tokens, by candidate id."""
    if not candidates:
        return
    file = file_of(run, step)
    file.parent.mkdir(exist_ok=True)
    with whole_file(file) as out:
        np.savez_compressed(
            out,
            ids=np.array(list(candidates)),
            lengths=np.array([len(tokens.gaps) for tokens in candidates.values()], np.int32),
            gaps=np.concatenate([tokens.gaps for tokens in candidates.values()]).astype(np.float16),
            entropies=np.concatenate([tokens.entropies for tokens in candidates.values()]).astype(np.float16),
        )


def read_token_figures(run: Path, step: int, later: int = 0) -> TokenFigures | None:
    """The learner's figures of the tokens of a step's candidates; None if there are none or they cannot be read.

    A step's candidates may be trained on in later steps, when rollouts run ahead of training. `later` is the number of
    following steps whose files are read too.
    """
    candidates: dict[str, CandidateTokens] = {}
    for training_step in range(step, step + later + 1):
        in_file: dict[str, CandidateTokens] = {}
        try:
            with np.load(file_of(run, training_step), allow_pickle=False) as stored:
                # The arrays hold the figures of all candidates, one after another.
                ends = np.cumsum(stored["lengths"])[:-1]
                gaps = np.split(stored["gaps"], ends)
                entropies = np.split(stored["entropies"], ends)
                for id, candidate_gaps, candidate_entropies in zip(stored["ids"], gaps, entropies, strict=True):
                    in_file[str(id)] = CandidateTokens(candidate_gaps, candidate_entropies)
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            continue  # the step has no file, or a broken one, which adds none of its candidates
        candidates |= in_file
    return TokenFigures(candidates) if candidates else None
