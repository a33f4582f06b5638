"""A teacher in this process: a model that scores the samples of policies."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cotune.algorithms.samples import TrainRow
from cotune.config.learner import LearnerSettings
from cotune.errors import ConfigError
from cotune.integrations.models.folder.folder import tokenizer_of
from cotune.trainer.learner.batching import lengths_of, micro_batches
from cotune.trainer.learner.load import load_frozen
from cotune.trainer.learner.memory.pass_size import MOST, PassSize


class LocalTeacher:
    """A model in this process. `logprobs` may be called from any thread, one at a time runs."""

    counters: Mapping[str, float] = {}

    def __init__(self, model: str, settings: LearnerSettings) -> None:
        """Load `model`, a folder or Hugging Face id. Raises ConfigError."""
        self._model = load_frozen(model, settings)
        self._lock = threading.Lock()
        tokens = settings.micro_batch_tokens
        self._size = PassSize(MOST["cpu"] if tokens == "auto" else tokens, alone=True)

    def logprobs(self, rows: Sequence[TrainRow]) -> list[npt.NDArray[np.float32]]:
        """As `Teacher.logprobs`."""
        with self._lock, torch.no_grad():
            return self._size.fitting(lambda: self._scores(rows), lambda: None)

    def _scores(self, rows: Sequence[TrainRow]) -> list[npt.NDArray[np.float32]]:
        """Compute the log-probabilities of each row's response tokens, in passes of the present size, in the order of
        `rows`."""
        scores: dict[int, npt.NDArray[np.float32]] = {}
        for part in micro_batches(rows, range(len(rows)), self._size.tokens, self._model.shares):
            part_rows = [rows[i] for i in part]
            values = self._model(part_rows)[0].cpu()  # one wait for the device per pass
            for i, row_values in zip(part, values.split(lengths_of(part_rows)), strict=True):
                scores[i] = row_values.numpy()
        return [scores[i] for i in range(len(rows))]


def check_tokenizers(teacher: str, tokenizer: Any, models: Mapping[str, str]) -> None:
    """Raises ConfigError unless all models have the tokens of the teacher's `tokenizer` under the same ids. Each of
    `models` has the field that names its teacher."""
    for model, field in models.items():
        if tokenizer_of(model).get_vocab() != tokenizer.get_vocab():
            fault = f"has another tokenizer than {model}"
            raise ConfigError(field, teacher, fault, "Take a larger model of its family.")
