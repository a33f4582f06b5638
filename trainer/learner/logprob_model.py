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
from cotune.integrations.models.folder.kinds import sees_images
from cotune.integrations.models.folder.vision import ImageInputs
from cotune.trainer.learner.attention_trial import prefers_flex
from cotune.trainer.learner.batching import tokens_of
from cotune.trainer.learner.device import to_device
from cotune.trainer.learner.dist import ProcessGroup
from cotune.trainer.learner.fused_layers import fuse_layers
from cotune.trainer.learner.logprobs import Head, token_logprobs
from cotune.trainer.learner.memory.adapter_copies import AdapterCopies
from cotune.trainer.learner.memory.checkpointing import Checkpointing
from cotune.trainer.learner.pass_inputs import PassInputs, prepare_pass
from cotune.trainer.learner.sampled_distribution import SampledDistribution
from cotune.trainer.learner.tree_attention import TreePass, attends_over_trees, states_over


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
        compute(texts, _pad([sequences[number] for number in texts]))
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


def tree_states(network: Any, inputs: PassInputs, *, flex: bool = False) -> Tensor:
    """The same states with each distinct token computed once, however the rows' beginnings are shared; `flex`: by
    FlexAttention."""
    assert inputs.tree is not None and inputs.places is not None
    device = network.get_input_embeddings().weight.device
    states = states_over(network, TreePass(inputs.tree, device, flex=flex, blocks=inputs.blocks))
    return states.index_select(0, to_device(inputs.places, device))


def _pad(sequences: Sequence[Sequence[int]]) -> Tensor:
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
        wanted = settings.shared_prompts and self.images is None
        self.shares = wanted and attends_over_trees(network, flex=self._flex)
        """Whether a pass computes once what its rows have in common: asked for, and possible with this model."""
        logits = network.get_output_embeddings().weight.shape[0]
        self.sampled_distribution = SampledDistribution(network.config.name_or_path, logits)
        self._head: Head | None = None
        self._copies: AdapterCopies | None = None
        self._autocast = self._needs_autocast(network.parameters())

    def fuse_layers(self, device: torch.device) -> None:
        """Compute by fused kernels from now on, if `device` is a GPU that they work on."""
        fuse_layers(self.network, device, getattr(torch, self._dtype))

    def choose_attention(self, group: ProcessGroup) -> None:
        """Choose the faster attention over trees on this network's device, unless the settings name one. All ranks of
        `group` choose the same, so all must call this.

        Called once before the first update, when the weights are on their device in their final form."""
        if self._chooses_attention and self.shares:
            dtype = getattr(torch, self._dtype)
            self._flex = prefers_flex(self.network, dtype, autocast=self._autocast, group=group)

    def _needs_autocast(self, computing: Iterable[Tensor]) -> bool:
        """Whether some weights that passes compute with are in another precision than the passes. Networks that see
        images are given them in float32."""
        dtype = getattr(torch, self._dtype)
        return self._dtype != "float32" and (self.images is not None or any(p.dtype != dtype for p in computing))

    def take_products(self, dtype: str) -> None:
        """Products are rounded to `dtype` on a CPU (`products.join_layers`); so are those of the logits from now on."""
        self._head = Head(self.network.get_output_embeddings().weight) if dtype == "bfloat16" else None

    def compute_by_itself(self, copies: AdapterCopies) -> None:
        """Layers compute with their adapters in one step (`products.join_layers`), by `copies`, which begin a pass.
        Autocast has nothing left to do, unless other weights are in another precision."""
        self._copies = copies
        joined: set[int] = set()
        for layer in copies.layers:
            joined.update(id(p) for part in (layer.lora_A, layer.lora_B) for p in part.parameters())
        self._autocast = self._needs_autocast(p for p in self.network.parameters() if id(p) not in joined)

    def prepare(self, rows: Sequence[TrainRow]) -> PassInputs:
        """The inputs of a pass over rows (`prepare_pass`). Any thread may call it."""
        return prepare_pass(rows or [FILLER], shared=self.shares, flex=self._flex)

    def forward(self, rows: Sequence[TrainRow] | PassInputs) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of each response token, rows in order; both [tokens], float32, in nats."""
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
        """[tokens, hidden] the last hidden states that predict the response tokens, rows in order."""
        inputs = rows if isinstance(rows, PassInputs) else self.prepare(rows)
        device = self.network.get_output_embeddings().weight.device
        if self._copies is not None:
            self._copies.refresh()
        with torch.autocast(device.type, dtype=getattr(torch, self._dtype), enabled=self._autocast):
            if inputs.tree is not None:
                return tree_states(self.network, inputs, flex=self._flex)
            return plain_states(self.network, inputs.rows, self.images)

    def reduce_next(self, on: bool) -> None:
        """Whether the next backward pass exchanges gradients between ranks, or only adds to this rank's own."""
        if self.sharded:
            self.set_requires_gradient_sync(on)

    def release(self) -> None:
        """Give gathered weights back after a pass without gradients."""
        if self.sharded:
            self.reshard()
