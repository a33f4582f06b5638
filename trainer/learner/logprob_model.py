"""A causal language model over training rows: the forward pass that learners train, local or sharded."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cotune.algorithms.samples import TrainRow
from cotune.errors import LearnerError
from cotune.integrations.models.folder.kinds import sees_images
from cotune.integrations.models.folder.vision import ImageInputs
from cotune.trainer.config.learner import LearnerSettings
from cotune.trainer.learner.batching import lengths_of, tokens_of
from cotune.trainer.learner.device import to_device
from cotune.trainer.learner.logprobs import Head, token_logprobs
from cotune.trainer.learner.memory.checkpointing import Checkpointing
from cotune.trainer.learner.sampled_distribution import SampledDistribution
from cotune.trainer.learner.token_tree import token_tree
from cotune.trainer.learner.tree_attention import TreePass, attends_over_trees, flex_problem, states_over

log = logging.getLogger("cotune")


def plain_states(network: Any, rows: Sequence[TrainRow], images: ImageInputs | None = None) -> Tensor:
    """One padded sequence per row: states [tokens, hidden] that predict the response tokens, rows in order.

    Padding is on the right, where a causal model never looks, so no mask is needed; the last response token
    predicts nothing and is left out. Of rows with `images` those go together whose images are of one form.
    """
    device = network.get_input_embeddings().weight.device
    sequences = [tokens_of(row) for row in rows]
    seeing = [number for number, row in enumerate(rows) if row.images]
    texts = [number for number, row in enumerate(rows) if not row.images]
    found: dict[int, Tensor] = {}

    def compute(members: Sequence[int], ids: Tensor, **given: Any) -> None:
        """`ids` [members, longest], padded."""
        states = network.base_model(input_ids=to_device(ids, device), use_cache=False, **given).last_hidden_state
        for number, own in zip(members, states, strict=True):  # [longest, hidden]
            found[number] = own[len(rows[number].prompt_ids) - 1 : len(sequences[number])]

    if texts:
        compute(texts, _padded([sequences[number] for number in texts]))
    if seeing and images is None:
        raise LearnerError(
            f"Row {rows[seeing[0]].id} has an image, and {type(network).__name__} sees none.", "Train one that does."
        )
    if seeing and images is not None:
        width = max(len(sequences[number]) for number in seeing)  # a row's last token is never an image's
        filled = [sequences[number] + sequences[number][-1:] * (width - len(sequences[number])) for number in seeing]
        asked = [(ids, rows[number].images) for ids, number in zip(filled, seeing, strict=True)]
        for members, given in images.together(network, asked):
            compute([seeing[i] for i in members], torch.tensor([filled[i] for i in members]), **given)
    return torch.cat([found[number] for number in range(len(rows))])


def tree_states(network: Any, rows: Sequence[TrainRow], *, flex: bool = False) -> Tensor:
    """The same states with each distinct token computed once, however the rows' beginnings are shared; `flex`: by
    FlexAttention."""
    tree = token_tree([tokens_of(row) for row in rows])
    device = network.get_input_embeddings().weight.device
    states = states_over(network, TreePass(tree, device, flex=flex))
    at = np.concatenate([path[len(row.prompt_ids) - 1 :] for path, row in zip(tree.paths, rows, strict=True)])
    return states.index_select(0, to_device(at, device))


def _padded(sequences: Sequence[Sequence[int]]) -> Tensor:
    """Ids [sequences, longest] (int64), padded with 0 on the right."""
    ids = np.zeros((len(sequences), max(map(len, sequences))), np.int64)
    for row, sequence in zip(ids, sequences, strict=True):
        row[: len(sequence)] = sequence
    return torch.from_numpy(ids)


FILLER = TrainRow(id="filler", role="", prompt_ids=(0,), response_ids=(0, 0), logprobs=(0.0, 0.0), advantage=0.0)
"""What a rank computes that has no rows left while other ranks still do."""


class LogprobModel(nn.Module):  # type: ignore[misc]
    """Rows in, log-probabilities out. FSDP gathers the network's weights for `forward` and `states` only.

    No rows stand for those of `FILLER`. Passes are in the precision `dtype` of the settings.
    """

    sharded = False
    """Set by FSDP's wrapping."""

    def __init__(self, network: Any, settings: LearnerSettings) -> None:
        super().__init__()
        self._dtype = settings.precision
        self._flex = settings.tree_attention == "flex"
        if self._flex and (problem := flex_problem(network, getattr(torch, self._dtype))):
            log.warning("FlexAttention cannot train this model here (%s): rows attend in blocks instead", problem)
            self._flex = False
        self.network = network
        self.checkpointing = Checkpointing(network)
        self.images = ImageInputs(network.config.name_or_path) if sees_images(network.config) else None
        possible = self.images is None and attends_over_trees(network, flex=self._flex)
        self.shares = possible and settings.shared_prompts
        """Whether a pass computes once what its rows have in common: asked for, and possible with this model."""
        logits = network.get_output_embeddings().weight.shape[0]
        self.sampled_distribution = SampledDistribution(network.config.name_or_path, logits)
        self._head: Head | None = None

    def take_products(self, dtype: str) -> None:
        """The layers compute in `dtype` by themselves (`products.join_layers`); so do the logits from now on."""
        self._head = Head(self.network.get_output_embeddings().weight) if dtype == "bfloat16" else None

    def forward(self, rows: Sequence[TrainRow]) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of each response token, rows in order; both [tokens], float32, in nats."""
        rows = rows or [FILLER]
        distribution = self.sampled_distribution
        head = self.network.get_output_embeddings()
        device = head.weight.device
        targets = np.concatenate([np.asarray(row.response_ids, np.int64) for row in rows])  # [tokens]
        temperatures = np.repeat([np.float32(row.temperature) for row in rows], lengths_of(rows))  # [tokens]
        hidden = self.states(rows)
        return token_logprobs(
            hidden,
            self._head or head.weight,
            head.bias,
            to_device(targets, device),
            to_device(temperatures, device),
            distribution.of(rows, device),
            token_ids=distribution.token_ids,
        )

    def states(self, rows: Sequence[TrainRow]) -> Tensor:
        """[tokens, hidden] the last hidden states that predict the response tokens, rows in order."""
        rows, device = rows or [FILLER], self.network.get_output_embeddings().weight.device
        with torch.autocast(device.type, dtype=getattr(torch, self._dtype), enabled=self._dtype != "float32"):
            if self.shares:
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
