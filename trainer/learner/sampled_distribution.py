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
from cotune.integrations.models.device_copies import to_device
from cotune.integrations.models.folder.folder import count_token_ids, read_tokenizer
from cotune.trainer.learner.batching import lengths_of
from cotune.trainer.learner.logprobs import LogitShaping


class SampledDistribution:
    """Finds the distribution from which the response tokens of rows were sampled.

    The tokenizer is loaded with the first row that needs it. Masks stay in memory from one pass over the rows to the
    next, until `clear`.
    """

    def __init__(self, model: str, logits: int) -> None:
        """`model` is a folder. Its network has this number of `logits`, which may include padding."""
        self._model = model
        self._logits = logits
        # Each distinct mask is stored once, and has a number: its index in `_masks`.
        self._masks: list[npt.NDArray[np.int32]] = []
        self._number_of_mask: dict[bytes, int] = {}
        self._mask_numbers_of_response: dict[tuple[str, tuple[int, ...]], npt.NDArray[np.int64]] = {}

    @cached_property
    def token_ids(self) -> int:
        """How many token ids could be drawn; see `count_token_ids`."""
        return count_token_ids(self._tokenizer, self._logits)

    @cached_property
    def _tokenizer(self) -> Any:
        return read_tokenizer(self._model)

    @cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self._tokenizer, self._logits)

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
        self._masks = []
        self._number_of_mask = {}
        self._mask_numbers_of_response = {}

    def of(self, rows: Sequence[TrainRow], device: torch.device) -> LogitShaping | None:
        """Return the changes to the logits of all response tokens, rows in order; None if no row has a grammar or a
        bias.

        Raises LearnerError for a response that its own grammar does not allow.
        """
        if not any(row.grammar or row.logit_bias for row in rows):
            return None

        # In both arrays of numbers, [tokens], -1 stands for a token without a bias or mask.
        biases = list(dict.fromkeys(row.logit_bias for row in rows if row.logit_bias))
        number_of_bias = {bias: number for number, bias in enumerate(biases)}
        bias_of_row = [number_of_bias.get(row.logit_bias, -1) for row in rows]
        bias_of_token = np.repeat(np.array(bias_of_row, np.int64), lengths_of(rows))
        mask_of_token = np.concatenate([self._mask_numbers(row) for row in rows])

        # Only the masks that these rows use are sent to the device. Number them again, from 0.
        has_mask = mask_of_token >= 0
        used_masks, new_numbers = np.unique(mask_of_token[has_mask], return_inverse=True)
        mask_of_token[has_mask] = new_numbers
        bits = np.empty((0, 0), np.int32)
        if len(used_masks):
            bits = np.stack([self._masks[number] for number in used_masks])
        return LogitShaping(
            bits=to_device(bits, device),
            bits_at=torch.from_numpy(mask_of_token),
            added=to_device(_bias_rows(biases, self._logits), device),
            added_at=torch.from_numpy(bias_of_token),
        )

    def without_forced_tokens(self, rows: Sequence[TrainRow]) -> list[TrainRow]:
        """Return the rows with loss masks that also leave out forced tokens: a token is forced if its grammar allowed
        no other one."""
        return [self._without_forced(row) if row.grammar else row for row in rows]

    def _without_forced(self, row: TrainRow) -> TrainRow:
        trained = np.array(row.loss_mask or (True,) * len(row.response_ids))  # [tokens]
        for token, number in enumerate(self._mask_numbers(row)):
            allowed_tokens = int(np.unpackbits(self._masks[number].view(np.uint8)).sum())
            if allowed_tokens == 1:
                trained[token] = False
        return msgspec.structs.replace(row, loss_mask=tuple(trained.tolist()))

    def _mask_numbers(self, row: TrainRow) -> npt.NDArray[np.int64]:
        """Return the number of each response token's mask, [tokens]; -1 for all if the row has no grammar."""
        if not row.grammar:
            return np.full(len(row.response_ids), -1)
        key = row.grammar, row.response_ids
        if key not in self._mask_numbers_of_response:
            try:
                masks = self._grammars.replay(row.grammar, row.response_ids)
            except SamplerError as error:
                raise LearnerError(f"Row {row.id} of role {row.role!r}: {error.cause}", error.remedy) from error
            self._mask_numbers_of_response[key] = np.array([self._store_mask(mask) for mask in masks])
        return self._mask_numbers_of_response[key]

    def _store_mask(self, mask: npt.NDArray[np.int32]) -> int:
        """Store a mask, unless an equal one is stored, and return its number."""
        key = mask.tobytes()
        if key not in self._number_of_mask:
            self._number_of_mask[key] = len(self._masks)
            self._masks.append(mask.copy())
        return self._number_of_mask[key]


def _bias_rows(biases: Sequence[tuple[tuple[int, float], ...]], vocabulary: int) -> npt.NDArray[np.float32]:
    """Return the amounts that each bias adds to the logits, [biases, vocabulary]."""
    amounts = np.zeros((len(biases), vocabulary), np.float32)
    for number, bias in enumerate(biases):
        for token, value in bias:
            amounts[number, token] += value
    return amounts
