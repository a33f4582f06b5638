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
    """Figures of a critic for the rows of an update: an array [tokens of the row] for each row."""

    values: list[Floats]
    """The values that the head gives."""
    advantages: list[Floats]
    targets: list[Floats]
    """The values that the head should have given, which it learns."""


class Critic:
    """Value heads, one for each policy whose loss has a critic.

    GAE computes the advantages of tokens from their values and from the reward of their row, which is in
    `TrainRow.advantage`. After the update, a head learns the values that it should have given.

    A head is a linear function of the policy's last hidden state, and begins at 0. The policy gets no gradient from it.
    Heads are saved in checkpoints only, and are not published. All ranks of a process group have the same heads. Each
    rank computes the values and gradients of its part of the rows, and the ranks add them up.
    """

    def __init__(self, policies: Mapping[str, tuple[int, LossSpec]], group: ProcessGroup) -> None:
        """`policies` has, by name of policy, the width of its hidden states and its loss."""
        self._group = group
        self._losses: dict[str, LossSpec] = {}
        self._heads: dict[str, nn.Linear] = {}
        self._optimizers: dict[str, torch.optim.AdamW] = {}
        for policy, (width, loss) in policies.items():
            if not loss.critic:
                continue
            head = nn.Linear(width, 1)
            nn.init.zeros_(head.weight)
            nn.init.zeros_(head.bias)
            self._losses[policy] = loss
            self._heads[policy] = head
            self._optimizers[policy] = torch.optim.AdamW(head.parameters(), lr=loss.critic_lr, weight_decay=0.0)

    def __contains__(self, policy: str) -> bool:
        return policy in self._heads

    def judge(self, policy: str, rows: Sequence[TrainRow], states: Mapping[int, Tensor]) -> Judged:
        """Compute values and advantages of all tokens of the rows.

        `states` has the last hidden states of this rank's part of the rows, [tokens of the row, hidden], by the row's
        number.
        """
        loss = self._losses[policy]
        values = self._values(policy, rows, states)
        advantages = []
        targets = []
        for row, row_values in zip(rows, values, strict=True):
            row_advantages = gae(row_values, row.advantage, loss.gae_gamma, loss.gae_lambda)
            advantages.append(row_advantages)
            targets.append(row_advantages + row_values)
        return Judged(values, whitened(advantages), targets)

    def learn(self, policy: str, states: Mapping[int, Tensor], judged: Judged) -> dict[str, float]:
        """Train the head on the targets. `states` is the argument of `judge`, and `judged` its result.

        Returns `value_loss`, the mean squared error of the values before this training, and `explained_variance`,
        1 - var(target - value) / var(target).
        """
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
        """Restore the head and its optimizer from the tensors that `state` returned."""
        head = self._heads[policy]
        optimizer = self._optimizers[policy]
        head.load_state_dict({key: state[key] for key in ("weight", "bias")})
        for key, parameter in head.named_parameters():
            moments = {moment: f"{moment}/{key}" for moment in _MOMENTS}
            # A head that no update has trained has no moments.
            optimizer.state[parameter] = {moment: state[name] for moment, name in moments.items() if name in state}

    def _values(self, policy: str, rows: Sequence[TrainRow], states: Mapping[int, Tensor]) -> list[Floats]:
        """Return the values of each row, [tokens of the row]. `states` has the hidden states of this rank's rows."""
        lengths = lengths_of(rows)
        values_here = torch.zeros(sum(lengths))
        by_row = values_here.split(lengths)
        with torch.no_grad():
            for number, row_states in states.items():
                by_row[number].copy_(self._heads[policy](row_states).squeeze(-1))
        # Rows of other ranks are 0 here, so the sum over ranks has the values of all rows.
        values = self._group.sum(values_here)
        return [row_values.numpy().astype(np.float64) for row_values in values.split(lengths)]

    def _fit(self, policy: str, states: Mapping[int, Tensor], targets: Sequence[Floats]) -> None:
        """Take `EPOCHS` optimizer steps on the mean squared error over the tokens of all rows.

        `states` has the hidden states of this rank's part of the rows, by the row's number, and `targets` the target
        values of all rows.
        """
        head = self._heads[policy]
        optimizer = self._optimizers[policy]
        tokens_of_all_ranks = sum(map(len, targets))
        # The empty arrays are for a rank without rows.
        inputs = torch.cat([torch.empty(0, head.in_features), *states.values()])  # [tokens of the rank, hidden]
        targets_here = np.concatenate([np.empty(0), *(targets[number] for number in states)])  # [tokens of the rank]
        expected = torch.from_numpy(targets_here).float()
        for _ in range(EPOCHS):
            optimizer.zero_grad()
            errors = head(inputs).squeeze(-1) - expected
            (errors.square().sum() / tokens_of_all_ranks).backward()
            for parameter in head.parameters():
                parameter.grad = self._group.sum(parameter.grad)
            optimizer.step()
