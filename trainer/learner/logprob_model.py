"""A causal language model as a module over training rows: the forward pass that learners train, local or sharded."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cotune.algorithms.samples import TrainRow
from cotune.trainer.learner.forward import plain_states, shared_states
from cotune.trainer.learner.logprobs import token_logprobs
from cotune.trainer.learner.sampled_distribution import SampledDistribution

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
        with _precision(device, dtype):
            if shared:
                hidden = shared_states(self.network, rows, always_continue=self.sharded)
            else:
                hidden = plain_states(self.network, rows)
        shaping = self.sampled_distribution.of(rows, head.weight.shape[0], device)
        return token_logprobs(hidden, head.weight, head.bias, targets, temperature.repeat_interleave(lengths), shaping)

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
