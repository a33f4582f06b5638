"""A teacher in this process: a model that scores the samples of policies."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cotune.algorithms.samples import TrainRow
from cotune.config.learner import LearnerSettings
from cotune.errors import ConfigError
from cotune.integrations.models.folder.folder import tokenizer_of
from cotune.trainer.learner.batching import lengths_of, micro_batches
from cotune.trainer.learner.load import load_frozen
from cotune.trainer.learner.memory.pass_size import MOST, PassSize


class LocalTeacher:
    """A model in this process. `logprobs` may be called from any thread; calls run one after the other."""

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
            return self._size.run_in_memory(lambda: self._logprobs_in_passes(rows))

    def _logprobs_in_passes(self, rows: Sequence[TrainRow]) -> list[npt.NDArray[np.float32]]:
        """Compute the log-probabilities of each row's response tokens, in passes of the present size."""
        if not rows:
            return []
        row_numbers: list[int] = []  # in the order of the passes
        logprobs_of_passes: list[Tensor] = []
        for numbers_of_pass in micro_batches(rows, range(len(rows)), self._size.tokens, self._model.shares):
            logprobs, _ = self._model([rows[number] for number in numbers_of_pass])
            row_numbers += numbers_of_pass
            logprobs_of_passes.append(logprobs)

        # One copy for all passes, so that the host waits for the device only once.
        by_row = torch.cat(logprobs_of_passes).cpu().split(lengths_of([rows[number] for number in row_numbers]))
        logprobs_by_row = dict(zip(row_numbers, by_row, strict=True))
        return [logprobs_by_row[number].numpy() for number in range(len(rows))]


def check_tokenizers(teacher: str, tokenizer: Any, models: Mapping[str, str]) -> None:
    """Raises ConfigError unless all models have the tokens of the teacher's `tokenizer` under the same ids.

    `models` has, for each model, the setting that names its teacher.
    """
    for model, field in models.items():
        if tokenizer_of(model).get_vocab() != tokenizer.get_vocab():
            fault = f"has another tokenizer than {model}"
            raise ConfigError(
                field, teacher, fault, f"Choose a teacher with the tokenizer of {model}: a larger model of its family."
            )
