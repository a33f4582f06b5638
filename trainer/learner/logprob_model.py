"""A causal language model over training rows: the forward pass that learners train, local or sharded."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cotune.algorithms.samples import TrainRow
from cotune.errors import LearnerError
from cotune.integrations.models.folder.kinds import sees_images
from cotune.integrations.models.folder.vision import ImageInputs
from cotune.trainer.learner.batching import tokens_of
from cotune.trainer.learner.logprobs import token_logprobs
from cotune.trainer.learner.memory.checkpointing import Checkpointing
from cotune.trainer.learner.sampled_distribution import SampledDistribution
from cotune.trainer.learner.token_tree import token_tree
from cotune.trainer.learner.tree_attention import TreePass, attends_over_trees, states_over


def plain_states(network: Any, rows: Sequence[TrainRow], images: ImageInputs | None = None) -> Tensor:
    """One padded sequence per row: states [tokens, hidden] that predict the response tokens, rows in order.

    Padding is on the right, where a causal model never looks, so no mask is needed; the last response token
    predicts nothing and is left out. Of rows with `images` those go together whose images are of one form.
    """
    if any(row.images for row in rows):
        return _seeing_states(network, rows, images)
    ids = _padded([tokens_of(row) for row in rows])
    device = network.get_input_embeddings().weight.device
    states = network.base_model(input_ids=ids.to(device), use_cache=False).last_hidden_state
    at_row = np.repeat(np.arange(len(rows)), [len(row.response_ids) for row in rows])
    at_position = np.concatenate([len(r.prompt_ids) - 1 + np.arange(len(r.response_ids)) for r in rows])
    return states[torch.from_numpy(at_row).to(device), torch.from_numpy(at_position).to(device)]


def _seeing_states(network: Any, rows: Sequence[TrainRow], images: ImageInputs | None) -> Tensor:
    seeing = [number for number, row in enumerate(rows) if row.images]
    texts = [number for number, row in enumerate(rows) if not row.images]
    if images is None:
        raise LearnerError(
            f"Row {rows[seeing[0]].id} has an image, and {type(network).__name__} sees none.", "Train one that does."
        )
    found: dict[int, Tensor] = {}
    if texts:
        states = plain_states(network, [rows[number] for number in texts])
        found.update(zip(texts, states.split([len(rows[number].response_ids) for number in texts]), strict=True))
    sequences = {number: tokens_of(rows[number]) for number in seeing}
    width = max(map(len, sequences.values()))
    filled = [ids + ids[-1:] * (width - len(ids)) for ids in sequences.values()]  # its last token is never an image's
    device = network.get_input_embeddings().weight.device
    asked = [(ids, rows[number].images) for ids, number in zip(filled, seeing, strict=True)]
    for members, given in images.together(network, asked):
        ids = torch.tensor([filled[member] for member in members], device=device)
        states = network.base_model(input_ids=ids, use_cache=False, **given).last_hidden_state
        for number, own in zip((seeing[member] for member in members), states, strict=True):
            found[number] = own[len(rows[number].prompt_ids) - 1 : len(sequences[number])]
    return torch.cat([found[number] for number in range(len(rows))])


def tree_states(network: Any, rows: Sequence[TrainRow], *, flex: bool = False) -> Tensor:
    """The same states with each distinct token computed once, however the rows' beginnings are shared; `flex`: by
    FlexAttention."""
    tree = token_tree([tokens_of(row) for row in rows])
    device = network.get_input_embeddings().weight.device
    states = states_over(network, TreePass(tree, device, flex=flex))
    at = np.concatenate([path[len(row.prompt_ids) - 1 :] for path, row in zip(tree.paths, rows, strict=True)])
    return states.index_select(0, torch.from_numpy(at).to(device))


def _padded(sequences: Sequence[Sequence[int]]) -> Tensor:
    """Ids [sequences, longest] (int64), padded with 0 on the right."""
    ids = np.zeros((len(sequences), max(map(len, sequences))), np.int64)
    for row, sequence in zip(ids, sequences, strict=True):
        row[: len(sequence)] = sequence
    return torch.from_numpy(ids)


FILLER = TrainRow(id="filler", role="", prompt_ids=(0,), response_ids=(0, 0), logprobs=(0.0, 0.0), advantage=0.0)
"""What a rank computes that has no rows left while other ranks still do."""


class LogprobModel(nn.Module):  # type: ignore[misc]
    """Rows in, log-probabilities out. FSDP gathers the network's weights for `forward` and `states` only."""

    sharded = False
    """Set by FSDP's wrapping."""

    def __init__(self, network: Any, *, flex: bool) -> None:
        super().__init__()
        self._flex = flex
        self.network = network
        self.checkpointing = Checkpointing(network)
        self.images = ImageInputs(network.config.name_or_path) if sees_images(network.config) else None
        self.shares = self.images is None and attends_over_trees(network, flex=flex)
        """Whether a pass can compute what its rows have in common once; not where it sees images."""
        self.sampled_distribution = SampledDistribution(network.config.name_or_path)

    def forward(self, rows: Sequence[TrainRow], *, shared: bool, dtype: str) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of each response token, rows in order; both [tokens], float32, in nats.

        `shared` computes each distinct token once, for a model that `shares`; `dtype` is the precision of the pass. No
        rows: those of `FILLER`.
        """
        rows = rows or [FILLER]
        head = self.network.get_output_embeddings()
        device = head.weight.device
        targets = torch.from_numpy(np.concatenate([np.asarray(r.response_ids, np.int64) for r in rows])).to(device)
        temperature = torch.tensor([row.temperature for row in rows], device=device)
        lengths = torch.tensor([len(row.response_ids) for row in rows], device=device)
        hidden = self._states(rows, shared=shared, dtype=dtype)
        shaping = self.sampled_distribution.of(rows, head.weight.shape[0], device)
        return token_logprobs(hidden, head.weight, head.bias, targets, temperature.repeat_interleave(lengths), shaping)

    def states(self, rows: Sequence[TrainRow], *, shared: bool, dtype: str) -> Tensor:
        """[tokens, hidden] the last hidden states that predict the response tokens, rows in order. No rows: those of
        `FILLER`."""
        return self._states(rows or [FILLER], shared=shared, dtype=dtype)

    def _states(self, rows: Sequence[TrainRow], *, shared: bool, dtype: str) -> Tensor:
        with _precision(self.network.get_output_embeddings().weight.device, dtype):
            if shared:
                return tree_states(self.network, rows, flex=self._flex)
            return plain_states(self.network, rows, self.images)

    def reduce_next(self, on: bool) -> None:
        """Whether the next backward pass exchanges gradients between ranks, or only adds to this rank's own."""
        if self.sharded:
            self.set_requires_gradient_sync(on)

    def release(self) -> None:
        """Give gathered weights back after a pass without gradients."""
        if self.sharded:
            self.reshard()


def _precision(device: torch.device, dtype: str) -> Any:
    if dtype == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, dtype))
