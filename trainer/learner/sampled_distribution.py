"""Makes again, from training rows, the grammar masks and logit biases under which their tokens were sampled."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from cotune.algorithms.samples import TrainRow
from cotune.errors import LearnerError, SamplerError
from cotune.integrations.models.chat.grammar import Grammars
from cotune.integrations.models.folder.folder import count_token_ids, read_tokenizer
from cotune.trainer.learner.device import to_device
from cotune.trainer.learner.logprobs import LogitShaping


class SampledDistribution:
    """Finds the distribution from which the tokens of rows were sampled, for a `model` folder with this number of
    `logits`.

    The tokenizer is loaded with the first row that needs it. Masks stay in memory from one pass over the rows to the
    next, until `clear`.
    """

    def __init__(self, model: str, logits: int) -> None:
        self._model = model
        self._logits = logits
        self._grammars: Grammars | None = None
        self._numbers: dict[bytes, int] = {}
        self._masks: list[npt.NDArray[np.int32]] = []
        self._known: dict[tuple[str, tuple[int, ...]], npt.NDArray[np.int64]] = {}

    @cached_property
    def token_ids(self) -> int:
        """How many token ids could be drawn; see `count_token_ids`."""
        return count_token_ids(self._tokenizer, self._logits)

    @cached_property
    def _tokenizer(self) -> Any:
        return read_tokenizer(self._model)

    def check(self, rows: Sequence[TrainRow]) -> None:
        """Raises LearnerError for a response with a token that could not be drawn."""
        for row in rows:
            highest = max(row.response_ids, default=0)
            if highest >= self.token_ids:
                raise LearnerError(
                    f"Row {row.id} of role {row.role!r} has the token {highest}, which the tokenizer of {self._model} "
                    f"does not have: its tokens are 0 to {self.token_ids - 1}.",
                    "Delete the episode from the records, or record it again: cotune no longer draws such tokens.",
                )

    def clear(self) -> None:
        """Drop the masks of earlier rows."""
        self._numbers = {}
        self._masks = []
        self._known = {}

    def of(self, rows: Sequence[TrainRow], device: torch.device) -> LogitShaping | None:
        """Return the distribution of all response tokens, rows in order; None if no row has a grammar or a bias.

        Raises LearnerError for a response that its own grammar does not allow.
        """
        if not any(row.grammar or row.logit_bias for row in rows):
            return None
        biases = list(dict.fromkeys(row.logit_bias for row in rows if row.logit_bias))
        number_of_bias = {bias: number for number, bias in enumerate(biases)}
        added_at = [np.full(len(row.response_ids), number_of_bias.get(row.logit_bias, -1)) for row in rows]
        # Only the masks that these rows use are sent to the device, so they get new numbers. -1 stands for no mask.
        mask_of_token = np.concatenate([self._mask_numbers(row) for row in rows])
        has_mask = mask_of_token >= 0
        used, new_numbers = np.unique(mask_of_token[has_mask], return_inverse=True)
        mask_of_token[has_mask] = new_numbers
        bits = np.stack([self._masks[i] for i in used]) if len(used) else np.empty((0, 0), np.int32)
        return LogitShaping(
            bits=to_device(bits, device),
            bits_at=torch.from_numpy(mask_of_token),
            added=to_device(_added(biases, self._logits), device),
            added_at=torch.from_numpy(np.concatenate(added_at)),
        )

    def without_forced_tokens(self, rows: Sequence[TrainRow]) -> list[TrainRow]:
        """The rows with loss masks that leave out each token that was the only one its grammar allowed."""
        return [self._without_forced(row) if row.grammar else row for row in rows]

    def _without_forced(self, row: TrainRow) -> TrainRow:
        numbers = self._mask_numbers(row)
        forced = np.array([int(np.unpackbits(self._masks[i].view(np.uint8)).sum()) == 1 for i in numbers])
        counts = ~forced & np.array(row.loss_mask or (True,) * len(forced))
        return msgspec.structs.replace(row, loss_mask=tuple(counts.tolist()))

    def _mask_numbers(self, row: TrainRow) -> npt.NDArray[np.int64]:
        """[tokens] number of each response token's mask in `_masks`, -1 without a grammar."""
        if not row.grammar:
            return np.full(len(row.response_ids), -1)
        key = row.grammar, row.response_ids
        if key not in self._known:
            try:
                bits = self._opened().replay(*key)
            except SamplerError as error:
                raise LearnerError(f"Row {row.id} of role {row.role!r}: {error.cause}", error.remedy) from error
            self._known[key] = np.array([self._number(mask) for mask in bits])
        return self._known[key]

    def _number(self, mask: npt.NDArray[np.int32]) -> int:
        number = self._numbers.setdefault(mask.tobytes(), len(self._masks))
        if number == len(self._masks):
            self._masks.append(mask.copy())
        return number

    def _opened(self) -> Grammars:
        if self._grammars is None:
            self._grammars = Grammars(self._tokenizer, self._logits)
        return self._grammars


def _added(biases: Sequence[tuple[tuple[int, float], ...]], vocabulary: int) -> npt.NDArray[np.float32]:
    """Return the amount that each bias adds to the logits, [biases, vocabulary]."""
    added = np.zeros((len(biases), vocabulary), np.float32)
    for row, bias in zip(added, biases, strict=True):
        for token, value in bias:
            row[token] += value
    return added
