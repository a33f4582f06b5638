"""A causal language model over training rows: the forward pass that learners train, local or sharded."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cotune.algorithms.samples import TrainRow
from cotune.trainer.learner.logprobs import token_logprobs
from cotune.trainer.learner.sampled_distribution import SampledDistribution


def plain_states(network: Any, rows: Sequence[TrainRow]) -> Tensor:
    """One padded sequence per row: states [tokens, hidden] that predict the response tokens, rows in order.

    Padding is on the right, where a causal model never looks, so no mask is needed; the last response token
    predicts nothing and is left out.
    """
    sequences = [row.prompt_ids + row.response_ids[:-1] for row in rows]
    ids, _ = _padded(sequences, left=False)
    device = network.get_input_embeddings().weight.device
    states = network.base_model(input_ids=ids.to(device), use_cache=False).last_hidden_state
    at_row = np.repeat(np.arange(len(rows)), [len(row.response_ids) for row in rows])
    at_position = np.concatenate([len(r.prompt_ids) - 1 + np.arange(len(r.response_ids)) for r in rows])
    return states[torch.from_numpy(at_row).to(device), torch.from_numpy(at_position).to(device)]


def shared_states(network: Any, rows: Sequence[TrainRow], *, always_continue: bool = False) -> Tensor:
    """The same states with each distinct prompt computed once.

    Its keys and values are expanded, with gradients, to the rows that continue it; its last state predicts their
    first tokens. `always_continue` runs that second pass also where all responses are of one token, so that ranks
    with other rows do the same.
    """
    from transformers import DynamicCache

    prompts: dict[tuple[int, ...], int] = {}
    owner = torch.tensor([prompts.setdefault(row.prompt_ids, len(prompts)) for row in rows])
    device = network.get_input_embeddings().weight.device
    ids, mask = _padded(list(prompts), left=True)
    owner, ids, mask = owner.to(device), ids.to(device), mask.to(device)
    even = bool(mask.all())
    cache = DynamicCache(config=network.config)
    first = network.base_model(
        input_ids=ids,
        attention_mask=None if even else mask,
        position_ids=None if even else (mask.cumsum(-1) - 1).clamp(min=0),
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state[:, -1:]
    states = first[owner]
    longest = max(len(row.response_ids) for row in rows)
    if longest > 1 or always_continue:
        rest, _ = _padded([row.response_ids[:-1] if longest > 1 else (0,) for row in rows], left=False)
        cache.batch_select_indices(owner)
        length = mask.sum(-1)[owner]
        steps = torch.arange(rest.shape[1], device=device)
        more = network.base_model(
            input_ids=rest.to(device),
            attention_mask=None if even else torch.cat([mask[owner], torch.ones_like(rest, device=device)], dim=1),
            position_ids=length[:, None] + steps,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        states = torch.cat([states, more], dim=1)
    lengths = torch.tensor([len(row.response_ids) for row in rows], device=device)
    return states[torch.arange(states.shape[1], device=device) < lengths[:, None]]


def can_share(network: Any) -> bool:
    """Whether every layer is full attention, whose cache holds all keys and values and carries gradients."""
    config = network.config.get_text_config()
    return set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}


def _padded(sequences: Sequence[Sequence[int]], *, left: bool) -> tuple[Tensor, Tensor]:
    """Ids [sequences, longest] padded with 0, and the mask of what is real; both int64."""
    width = max(map(len, sequences))
    ids = np.zeros((len(sequences), width), np.int64)
    mask = np.zeros_like(ids)
    for index, sequence in enumerate(sequences):
        real = slice(width - len(sequence), width) if left else slice(0, len(sequence))
        ids[index, real] = sequence
        mask[index, real] = 1
    return torch.from_numpy(ids), torch.from_numpy(mask)


FILLER = TrainRow(id="filler", role="", prompt_ids=(0,), response_ids=(0, 0), logprobs=(0.0, 0.0), advantage=0.0)
"""What a rank computes that has no rows left while other ranks still do."""


class LogprobModel(nn.Module):  # type: ignore[misc]
    """Rows in, log-probabilities out. FSDP gathers the network's weights for `forward` only."""

    sharded = False
    """Set by FSDP's wrapping: passes must then be of the same kind on all ranks."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network
        self.sampled_distribution = SampledDistribution(network.config.name_or_path)

    def forward(self, rows: Sequence[TrainRow], *, shared: bool, dtype: str) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of each response token, rows in order; both [tokens], float32, in nats.

        `shared` computes each distinct prompt once; `dtype` is the precision of the pass. No rows: those of `FILLER`.
        """
        rows = rows or [FILLER]
        head = self.network.get_output_embeddings()
        device = head.weight.device
        targets = torch.from_numpy(np.concatenate([np.asarray(r.response_ids, np.int64) for r in rows])).to(device)
        temperature = torch.tensor([row.temperature for row in rows], device=device)
        lengths = torch.tensor([len(row.response_ids) for row in rows], device=device)
        hidden = self.states(rows, shared=shared, dtype=dtype)
        shaping = self.sampled_distribution.of(rows, head.weight.shape[0], device)
        return token_logprobs(hidden, head.weight, head.bias, targets, temperature.repeat_interleave(lengths), shaping)

    def states(self, rows: Sequence[TrainRow], *, shared: bool, dtype: str) -> Tensor:
        """[tokens, hidden] the last hidden states that predict the response tokens, rows in order."""
        with _precision(self.network.get_output_embeddings().weight.device, dtype):
            if shared:
                return shared_states(self.network, rows, always_continue=self.sharded)
            return plain_states(self.network, rows)

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
