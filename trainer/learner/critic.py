"""A critic beside a learner: a value head for each policy, and the advantages of tokens that come from it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from cotune.algorithms.advantages import gae, whitened
from cotune.algorithms.recipes import LossSpec
from cotune.algorithms.samples import Floats, TrainRow
from cotune.trainer.learner.batching import lengths_of
from cotune.trainer.learner.dist import ProcessGroup, SingleProcess
from cotune.trainer.learner.files import read_critic, restoring, write_critic
from cotune.trainer.learner.local import LocalLearner
from cotune.trainer.learner.protocol import LearnerAround

EPOCHS = 8
"""Steps that the value head takes on the rows of an update."""
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class CriticLearner(LearnerAround):
    """Takes the `advantage` of each row for its reward, gives its tokens their advantages by GAE, and lets `inner`
    train on them; then the value heads learn what they should have said.

    A value head is linear in the policy's last hidden state, which gets no gradient from it, and begins at 0. It is in
    the checkpoints and nowhere else. In a process group of several all ranks have the same heads: each computes the
    values and gradients of the rows that are its part, and their sums go to all.
    """

    def __init__(self, inner: LocalLearner, loss: LossSpec, group: ProcessGroup | None = None) -> None:
        super().__init__(inner)
        self._inner = inner
        self._loss = loss
        self._group = group or SingleProcess()
        self._heads: dict[str, nn.Linear] = {}
        self._optimizers: dict[str, torch.optim.AdamW] = {}
        for name, policy in inner.policies.items():
            head = nn.Linear(policy.width, 1)
            nn.init.zeros_(head.weight)
            nn.init.zeros_(head.bias)
            self._heads[name] = head
            self._optimizers[name] = torch.optim.AdamW(head.parameters(), lr=loss.critic_lr, weight_decay=0.0)

    def update(self, policy: str, rows: Sequence[TrainRow], *, lr_scale: float = 1.0) -> Mapping[str, float]:
        """As the inner learner's, with `value_loss` (mean squared error of the values before the update) and
        `explained_variance`, 1 - var(target - value) / var(target)."""
        seen = [msgspec.structs.replace(row, prompt_ids=row.privileged + row.prompt_ids) for row in rows]
        states = self._inner.states(policy, seen)
        values = self._values(policy, rows, states)
        loss = self._loss
        raw = [gae(v, row.advantage, loss.gae_gamma, loss.gae_lambda) for v, row in zip(values, rows, strict=True)]
        targets = [a + v for a, v in zip(raw, values, strict=True)]
        weighed = [
            msgspec.structs.replace(row, advantages=tuple(own.tolist()))
            for row, own in zip(rows, whitened(raw), strict=True)
        ]
        figures = self._inner.update(policy, weighed, lr_scale=lr_scale)
        self._learn(policy, states, targets)
        aims = np.concatenate(targets)
        errors, spread = aims - np.concatenate(values), float(aims.var())
        return {
            **figures,
            "value_loss": float(np.square(errors).mean()),
            "explained_variance": 1.0 - float(errors.var()) / spread if spread > 0.0 else 0.0,
        }

    def save(self, folder: Path) -> None:
        """What the inner learner saves, and the value heads with their optimizers."""
        self._inner.save(folder)
        self._save_heads(folder)

    def save_policies(self, folder: Path) -> None:
        """What `save` writes of each policy."""
        self._inner.save_policies(folder)
        self._save_heads(folder)

    def load(self, folder: Path, new: Collection[str] = ()) -> None:
        """Restore what `save` wrote, here or in a learner of several processes; heads of policies that are `new` begin
        at 0. Raises RunError as the inner one."""
        self._inner.load(folder, new)
        self._load_heads(folder, new)

    def load_policies(self, folder: Path, new: Collection[str] = ()) -> None:
        """What `load` restores of each policy."""
        self._inner.load_policies(folder, new)
        self._load_heads(folder, new)

    def _save_heads(self, folder: Path) -> None:
        if self._group.rank == 0:
            for name, policy in self._inner.policies.items():
                write_critic(folder, policy, self._state(name))

    def _load_heads(self, folder: Path, new: Collection[str]) -> None:
        with restoring(folder):
            for name, policy in self._inner.policies.items():
                if name not in new:
                    found = read_critic(folder, policy)
                    head, optimizer = self._heads[name], self._optimizers[name]
                    head.load_state_dict({key: found[key] for key in ("weight", "bias")})
                    for key, parameter in head.named_parameters():
                        kept = {k: found[at] for k in _MOMENTS if (at := f"{k}/{key}") in found}
                        optimizer.state[parameter] = kept

    def _state(self, policy: str) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for key, parameter in self._heads[policy].named_parameters():
            found[key] = parameter.detach()
            moments = self._optimizers[policy].state.get(parameter, {})
            found |= {f"{k}/{key}": tensor for k, tensor in moments.items()}
        return found

    def _values(self, policy: str, rows: Sequence[TrainRow], states: Mapping[int, Tensor]) -> list[Floats]:
        """[tokens of the row] of each row, of which `states` has those of this rank's part."""
        lengths = lengths_of(rows)
        found = torch.zeros(sum(lengths))
        parts = found.split(lengths)
        with torch.no_grad():
            for number, own in states.items():
                parts[number].copy_(self._heads[policy](own).squeeze(-1))
        return [part.numpy().astype(np.float64) for part in self._group.sum(found).split(lengths)]

    def _learn(self, policy: str, states: Mapping[int, Tensor], targets: Sequence[Floats]) -> None:
        """Steps on the mean squared error over the tokens of all rows; `states` are of this rank's part of them."""
        head, optimizer = self._heads[policy], self._optimizers[policy]
        tokens = sum(map(len, targets))
        inputs = torch.cat([torch.empty(0, head.in_features), *states.values()])
        aims = torch.from_numpy(np.concatenate([np.empty(0), *(targets[number] for number in states)])).float()
        for _ in range(EPOCHS):
            optimizer.zero_grad()
            ((head(inputs).squeeze(-1) - aims).square().sum() / tokens).backward()
            for parameter in head.parameters():
                parameter.grad = self._group.sum(parameter.grad)
            optimizer.step()
