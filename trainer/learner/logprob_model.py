"""A causal language model over training rows: the forward pass that learners train, local or sharded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cotune.algorithms.samples import TrainRow
from cotune.config.learner import LearnerSettings
from cotune.errors import LearnerError
from cotune.integrations.models.device_copies import to_device
from cotune.integrations.models.folder.kinds import sees_images
from cotune.integrations.models.folder.vision import ImageInputs
from cotune.trainer.learner.attention_trial import prefers_flex
from cotune.trainer.learner.batching import tokens_of
from cotune.trainer.learner.dist import ProcessGroup
from cotune.trainer.learner.fused_layers import fuse_layers
from cotune.trainer.learner.logprobs import Head, token_logprobs
from cotune.trainer.learner.memory.adapter_copies import AdapterCopies
from cotune.trainer.learner.memory.checkpointing import Checkpointing
from cotune.trainer.learner.pass_inputs import PassInputs, prepare_pass
from cotune.trainer.learner.sampled_distribution import SampledDistribution
from cotune.trainer.learner.tree_attention import TreePass, attends_over_trees, states_over


def plain_states(network: Any, rows: Sequence[TrainRow], images: ImageInputs | None = None) -> Tensor:
    """Compute the states that predict the response tokens, [tokens, hidden], rows in order, from one padded sequence
    per row.

    Padding is on the right, where a causal model never looks, so no mask is needed. The last response token predicts
    nothing and is left out. Rows with images are computed together if their images have the same form. Raises
    LearnerError for a row with an image if the network sees none (`images` is None).
    """
    device = network.get_input_embeddings().weight.device
    sequences = [tokens_of(row) for row in rows]
    states_of_row: dict[int, Tensor] = {}

    def compute(numbers: Sequence[int], ids: Tensor, **image_inputs: Any) -> None:
        """Compute the states of the rows with these numbers from their padded `ids` [rows, longest]."""
        output = network.base_model(input_ids=to_device(ids, device), use_cache=False, **image_inputs)
        for number, states in zip(numbers, output.last_hidden_state, strict=True):  # [longest, hidden]
            # A state predicts the next token: the states of a response begin at the last token of its prompt.
            first = len(rows[number].prompt_ids) - 1
            states_of_row[number] = states[first : len(sequences[number])]

    # 1. All rows without images at once.
    text_rows = [number for number, row in enumerate(rows) if not row.images]
    if text_rows:
        compute(text_rows, _pad([sequences[number] for number in text_rows]))

    # 2. Rows with images, in batches whose images have the same form.
    image_rows = [number for number, row in enumerate(rows) if row.images]
    if image_rows:
        if images is None:
            raise LearnerError(
                f"Row {rows[image_rows[0]].id} has an image, but {type(network).__name__} cannot see images.",
                "Train a model that sees images.",
            )
        longest = max(len(sequences[number]) for number in image_rows)
        # Padded with the last token of the row, which is never an image's: 0 may be the token of an image.
        padded: list[tuple[int, ...]] = []
        for number in image_rows:
            sequence = sequences[number]
            padded.append(sequence + sequence[-1:] * (longest - len(sequence)))
        requests = [(ids, rows[number].images) for ids, number in zip(padded, image_rows, strict=True)]
        for members, image_inputs in images.together(network, requests):
            ids_of_members = torch.tensor([padded[member] for member in members])
            compute([image_rows[member] for member in members], ids_of_members, **image_inputs)
    return torch.cat([states_of_row[number] for number in range(len(rows))])


def tree_states(network: Any, inputs: PassInputs, *, flex: bool = False) -> Tensor:
    """Compute the states of `plain_states` with each distinct token computed once. `flex` says whether the network
    attends by FlexAttention. The inputs need a tree."""
    assert inputs.tree is not None and inputs.places is not None
    device = network.get_input_embeddings().weight.device
    states = states_over(network, TreePass(inputs.tree, device, flex=flex, blocks=inputs.blocks))
    return states.index_select(0, to_device(inputs.places, device))


def _pad(sequences: Sequence[Sequence[int]]) -> Tensor:
    """Return the sequences as ids [sequences, longest] (int64), padded with 0 on the right."""
    ids = np.zeros((len(sequences), max(map(len, sequences))), np.int64)
    for number, sequence in enumerate(sequences):
        ids[number, : len(sequence)] = sequence
    return torch.from_numpy(ids)


FILLER = TrainRow(id="filler", role="", prompt_ids=(0,), response_ids=(0, 0), logprobs=(0.0, 0.0), advantage=0.0)
"""The row that a rank computes when it has no rows left and other ranks still have some: all must make the same
passes."""


class LogprobModel(nn.Module):  # type: ignore[misc]
    """A network that computes the log-probabilities of rows.

    FSDP gathers the network's weights for `forward` and `states` only. Without any rows, these compute the row
    `FILLER`. Passes are in the precision of the settings.
    """

    sharded = False
    """Whether FSDP has sharded the network (`fsdp.worker`)."""

    def __init__(self, network: Any, settings: LearnerSettings) -> None:
        """Wrap a loaded network: fuse its layers where its device has kernels, and find out whether its attention can
        compute shared beginnings of rows once."""
        super().__init__()
        self._dtype = settings.precision
        self._flex = settings.tree_attention == "flex"
        self._chooses_attention = settings.tree_attention == "auto"
        self.network = network
        self.fuse_layers(network.get_input_embeddings().weight.device)
        self.checkpointing = Checkpointing(network)
        self.images = ImageInputs(network.config.name_or_path) if sees_images(network.config) else None
        may_share = settings.shared_prompts and self.images is None
        self.shares = may_share and attends_over_trees(network, flex=self._flex)
        """Whether a pass computes common beginnings of its rows only once: the settings ask for it, and the model can
        do it."""
        logits = network.get_output_embeddings().weight.shape[0]
        self.sampled_distribution = SampledDistribution(network.config.name_or_path, logits)
        self._head: Head | None = None
        self._copies: AdapterCopies | None = None
        self._autocast = self._needs_autocast(network.parameters())

    def fuse_layers(self, device: torch.device) -> None:
        """Let the network compute by fused kernels, if they work on `device`."""
        fuse_layers(self.network, device, getattr(torch, self._dtype))

    def choose_attention(self, group: ProcessGroup) -> None:
        """Choose the faster attention over trees on this network's device, unless the settings name one. All ranks of
        `group` choose the same, so all must call this.

        Called once before the first update, when the weights are on their device in their final form."""
        if self._chooses_attention and self.shares:
            dtype = getattr(torch, self._dtype)
            self._flex = prefers_flex(self.network, dtype, autocast=self._autocast, group=group)

    def _needs_autocast(self, weights: Iterable[Tensor]) -> bool:
        """Whether passes need autocast: some of the `weights` that they compute with, or images, are in another
        precision than the passes."""
        if self._dtype == "float32":
            return False
        if self.images is not None:
            return True  # images are in float32
        dtype = getattr(torch, self._dtype)
        return any(weight.dtype != dtype for weight in weights)

    def round_logit_products(self, dtype: str) -> None:
        """Round the factors of the logits' products to `dtype` on a CPU, as `products.join_layers` does in layers."""
        self._head = Head(self.network.get_output_embeddings().weight) if dtype == "bfloat16" else None

    def use_copies(self, copies: AdapterCopies) -> None:
        """Compute with `copies` of the adapters in the precision of passes, which are refreshed before each pass. The
        layers must have been changed to use them (`products.join_layers`)."""
        self._copies = copies
        copied: set[int] = set()
        for layer in copies.layers:
            copied.update(id(parameter) for parameter in layer.lora_A.parameters())
            copied.update(id(parameter) for parameter in layer.lora_B.parameters())
        # Only weights without a copy may still be in another precision than the passes.
        self._autocast = self._needs_autocast(p for p in self.network.parameters() if id(p) not in copied)

    def prepare(self, rows: Sequence[TrainRow]) -> PassInputs:
        """Prepare the inputs of a pass over rows (`prepare_pass`). Any thread may call this."""
        return prepare_pass(rows or [FILLER], shared=self.shares, flex=self._flex)

    def forward(self, rows: Sequence[TrainRow] | PassInputs) -> tuple[Tensor, Tensor]:
        """Compute the log-probability and the entropy of each response token, rows in order; both [tokens], float32, in
        nats."""
        inputs = rows if isinstance(rows, PassInputs) else self.prepare(rows)
        distribution = self.sampled_distribution
        head = self.network.get_output_embeddings()
        device = head.weight.device
        hidden = self.states(inputs)
        return token_logprobs(
            hidden,
            self._head or head.weight,
            head.bias,
            to_device(inputs.targets, device),
            to_device(inputs.temperatures, device),
            distribution.of(inputs.rows, device),
            token_ids=distribution.token_ids,
        )

    def states(self, rows: Sequence[TrainRow] | PassInputs) -> Tensor:
        """Compute the last hidden states that predict the response tokens, [tokens, hidden], rows in order."""
        inputs = rows if isinstance(rows, PassInputs) else self.prepare(rows)
        device = self.network.get_output_embeddings().weight.device
        if self._copies is not None:
            self._copies.refresh()
        with torch.autocast(device.type, dtype=getattr(torch, self._dtype), enabled=self._autocast):
            if inputs.tree is not None:
                return tree_states(self.network, inputs, flex=self._flex)
            return plain_states(self.network, inputs.rows, self.images)

    def reduce_next(self, on: bool) -> None:
        """Choose whether the next backward pass sums gradients over ranks (`on`), or only adds to the gradients of this
        rank. Without FSDP, it does nothing."""
        if self.sharded:
            self.set_requires_gradient_sync(on)

    def release(self) -> None:
        """Free the weights that FSDP has gathered for a pass without gradients."""
        if self.sharded:
            self.reshard()
