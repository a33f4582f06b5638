"""A critic: a value head for each policy, and the advantages of tokens that come from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from cotune.algorithms.advantages import gae, whitened
from cotune.algorithms.recipes import LossSpec
from cotune.algorithms.samples import Floats, TrainRow
from cotune.trainer.learner.batching import lengths_of
from cotune.trainer.learner.dist import ProcessGroup

EPOCHS = 8
"""Steps that the value head takes on the rows of an update."""
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""Names of the state that AdamW keeps for a tensor."""


class Judged(NamedTuple):
    """A critic's view of the rows of an update, each [tokens of the row]: values, advantages, and values to learn."""

    values: list[Floats]
    advantages: list[Floats]
    targets: list[Floats]


class Critic:
    """Value heads, one per policy whose loss has a critic: GAE makes the advantages of tokens from their values and the
    row's reward, which stands in `advantage`; after the update the heads learn the values that they should have given.

    A head is linear in the policy's last hidden state, which gets no gradient from it, and begins at 0. It is in the
    checkpoints and nowhere else. In a process group of several all ranks have the same heads: each computes the values
    and gradients of the rows that are its part, and their sums go to all.
    """

    def __init__(self, policies: Mapping[str, tuple[int, LossSpec]], group: ProcessGroup) -> None:
        """`policies` has, by name of policy, the width of its hidden states and its loss."""
        self._losses = {name: loss for name, (_, loss) in policies.items() if loss.critic}
        self._group = group
        self._heads: dict[str, nn.Linear] = {}
        self._optimizers: dict[str, torch.optim.AdamW] = {}
        for policy, loss in self._losses.items():
            width, _ = policies[policy]
            head = nn.Linear(width, 1)
            self._heads[policy] = head
            nn.init.zeros_(head.weight)
            nn.init.zeros_(head.bias)
            self._optimizers[policy] = torch.optim.AdamW(head.parameters(), lr=loss.critic_lr, weight_decay=0.0)

    def __contains__(self, policy: str) -> bool:
        return policy in self._heads

    def judge(self, policy: str, rows: Sequence[TrainRow], states: Mapping[int, Tensor]) -> Judged:
        """Compute values and advantages of all tokens of the rows.

        `states` are the last hidden states [tokens of the row, hidden] of this rank's part of the rows.
        """
        values = self._values(policy, rows, states)
        loss = self._losses[policy]
        raw = [gae(v, row.advantage, loss.gae_gamma, loss.gae_lambda) for v, row in zip(values, rows, strict=True)]
        return Judged(values, whitened(raw), [a + v for a, v in zip(raw, values, strict=True)])

    def learn(self, policy: str, states: Mapping[int, Tensor], judged: Judged) -> dict[str, float]:
        """Train the head; returns `value_loss` (mean squared error of the values before the update) and
        `explained_variance`, 1 - var(target - value) / var(target)."""
        self._fit(policy, states, judged.targets)
        targets = np.concatenate(judged.targets)
        errors = targets - np.concatenate(judged.values)
        variance = float(targets.var())
        return {
            "value_loss": float(np.square(errors).mean()),
            "explained_variance": 1.0 - float(errors.var()) / variance if variance > 0.0 else 0.0,
        }

    def state(self, policy: str) -> dict[str, Tensor]:
        """Return the head's tensors, and the moments of its optimizer as `<moment>/<tensor>`."""
        tensors: dict[str, Tensor] = {}
        for key, parameter in self._heads[policy].named_parameters():
            tensors[key] = parameter.detach()
            moments = self._optimizers[policy].state.get(parameter, {})
            tensors |= {f"{moment}/{key}": tensor for moment, tensor in moments.items()}
        return tensors

    def load(self, policy: str, state: Mapping[str, Tensor]) -> None:
        """Restore the tensors of `state`."""
        head = self._heads[policy]
        optimizer = self._optimizers[policy]
        head.load_state_dict({key: state[key] for key in ("weight", "bias")})
        for key, parameter in head.named_parameters():
            optimizer.state[parameter] = {k: state[at] for k in _MOMENTS if (at := f"{k}/{key}") in state}

    def _values(self, policy: str, rows: Sequence[TrainRow], states: Mapping[int, Tensor]) -> list[Floats]:
        """Return the values of each row, [tokens of the row]. `states` has the hidden states of this rank's rows."""
        lengths = lengths_of(rows)
        values = torch.zeros(sum(lengths))
        parts = values.split(lengths)
        with torch.no_grad():
            for number, row_states in states.items():
                parts[number].copy_(self._heads[policy](row_states).squeeze(-1))
        return [part.numpy().astype(np.float64) for part in self._group.sum(values).split(lengths)]

    def _fit(self, policy: str, states: Mapping[int, Tensor], targets: Sequence[Floats]) -> None:
        """Take `EPOCHS` optimizer steps on the mean squared error over the tokens of all rows.

        `states` are the hidden states of this rank's part of the rows.
        """
        head = self._heads[policy]
        optimizer = self._optimizers[policy]
        tokens = sum(map(len, targets))
        inputs = torch.cat([torch.empty(0, head.in_features), *states.values()])
        # The empty arrays are for a rank without rows.
        targets_of_rank = np.concatenate([np.empty(0), *(targets[number] for number in states)])
        targets_tensor = torch.from_numpy(targets_of_rank).float()
        for _ in range(EPOCHS):
            optimizer.zero_grad()
            ((head(inputs).squeeze(-1) - targets_tensor).square().sum() / tokens).backward()
            for parameter in head.parameters():
                parameter.grad = self._group.sum(parameter.grad)
            optimizer.step()
