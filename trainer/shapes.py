"""What shaped the distribution that rows were drawn from, made again from the rows: grammars and token biases."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from cotune.errors import LearnerError, SamplerError
from cotune.integrations.grammar import Grammars
from cotune.integrations.model_folder import loading
from cotune.samples import TrainRow
from cotune.trainer.logprobs import Shapes


class RowShapes:
    """Makes the `Shapes` of rows with the tokenizer of `model`, which is loaded when the first row has a grammar."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._grammars: Grammars | None = None

    def of(self, rows: Sequence[TrainRow], vocabulary: int, device: torch.device) -> Shapes | None:
        """Shapes of all response tokens, rows in order; None where nothing shaped any.

        Raises LearnerError for a reply that its own grammar does not allow.
        """
        if not any(row.grammar or row.logit_bias for row in rows):
            return None
        masks: dict[bytes, int] = {}
        biases: dict[tuple[tuple[int, float], ...], int] = {}
        bits_at, added_at = [], []
        for row in rows:
            length = len(row.response_ids)
            bits_at += self._masks(row, vocabulary, masks) if row.grammar else [-1] * length
            added_at += [biases.setdefault(row.logit_bias, len(biases)) if row.logit_bias else -1] * length
        added = torch.zeros((len(biases), vocabulary))
        for bias, at in biases.items():
            tokens, values = zip(*bias, strict=True)
            added[at, list(tokens)] = torch.tensor(values)
        bits = np.frombuffer(b"".join(masks), np.int32).reshape(len(masks), -1 if masks else 0)
        parts = torch.from_numpy(bits.copy()), torch.tensor(bits_at), added, torch.tensor(added_at)
        return Shapes(*(part.to(device) for part in parts))

    def _masks(self, row: TrainRow, vocabulary: int, masks: dict[bytes, int]) -> list[int]:
        try:
            bits = self._opened(vocabulary).replay(row.grammar, row.response_ids)
        except SamplerError as error:
            raise LearnerError(f"Row {row.id} of role {row.role!r}: {error.cause}", error.remedy) from error
        return [masks.setdefault(mask.tobytes(), len(masks)) for mask in bits]

    def _opened(self, vocabulary: int) -> Grammars:
        if self._grammars is None:
            from transformers import AutoTokenizer

            self._grammars = Grammars(AutoTokenizer.from_pretrained(self._model, **loading()), vocabulary)
        return self._grammars
