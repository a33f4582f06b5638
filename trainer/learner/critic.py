"""A critic beside a learner: a value head for each policy, and the advantages of tokens that come from it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from cotune.algorithms.gae import gae, whitened
from cotune.algorithms.recipes import LossSpec
from cotune.algorithms.samples import TrainRow
from cotune.trainer.learner.files import restoring
from cotune.trainer.learner.local import LocalLearner
from cotune.trainer.learner.protocol import LearnerAround

EPOCHS = 8
"""Steps that the value head takes on the rows of an update."""
FILE = "critic.safetensors"


class CriticLearner(LearnerAround):
    """Takes the `advantage` of each row for its reward, gives its tokens their advantages by GAE, and lets `inner`
    train on them; then the value heads learn what they should have said.

    A value head is linear in the policy's last hidden state, which gets no gradient from it, and begins at 0. It is in
    the checkpoints and nowhere else.
    """

    def __init__(self, inner: LocalLearner, loss: LossSpec) -> None:
        super().__init__(inner)
        self._inner = inner
        self._loss = loss
        self._heads: dict[str, nn.Linear] = {}
        self._optimizers: dict[str, torch.optim.AdamW] = {}
        for name, width in inner.widths().items():
            head = nn.Linear(width, 1)
            nn.init.zeros_(head.weight)
            nn.init.zeros_(head.bias)
            self._heads[name] = head
            self._optimizers[name] = torch.optim.AdamW(head.parameters(), lr=loss.critic_lr, weight_decay=0.0)

    def update(self, policy: str, rows: Sequence[TrainRow], *, lr_scale: float = 1.0) -> Mapping[str, float]:
        """As the inner learner's, with `value_loss` (mean squared error of the values before the update) and
        `explained_variance`, 1 - var(target - value) / var(target)."""
        seen = [msgspec.structs.replace(row, prompt_ids=row.privileged + row.prompt_ids) for row in rows]
        states = self._inner.states(policy, seen)
        with torch.no_grad():
            values = [self._values(policy, own).numpy().astype(np.float64) for own in states]
        loss = self._loss
        raw = [gae(v, row.advantage, loss.gae_gamma, loss.gae_lambda) for v, row in zip(values, rows, strict=True)]
        targets = np.concatenate([a + v for a, v in zip(raw, values, strict=True)])
        errors = targets - np.concatenate(values)
        weighed = [
            msgspec.structs.replace(row, advantages=tuple(own.tolist()))
            for row, own in zip(rows, whitened(raw), strict=True)
        ]
        figures = self._inner.update(policy, weighed, lr_scale=lr_scale)
        self._learn(policy, torch.cat(list(states)), torch.from_numpy(targets).float())
        spread = float(targets.var())
        return {
            **figures,
            "value_loss": float(np.square(errors).mean()),
            "explained_variance": 1.0 - float(errors.var()) / spread if spread > 0.0 else 0.0,
        }

    def save(self, folder: Path) -> None:
        """What the inner learner saves, and the value heads with their optimizers."""
        from safetensors.torch import save_file

        self._inner.save(folder)
        save_file({name: tensor.contiguous() for name, tensor in self._state().items()}, folder / FILE)

    def load(self, folder: Path, new: Collection[str] = ()) -> None:
        """Restore what `save` wrote; heads of policies that are `new` begin at 0. Raises RunError as the inner one."""
        from safetensors.torch import load_file

        self._inner.load(folder, new)
        with restoring(folder):
            found = load_file(folder / FILE)
            for name, head in self._heads.items():
                if name in new:
                    continue
                head.load_state_dict({key: found[f"{name}/{key}"] for key in ("weight", "bias")})
                optimizer = self._optimizers[name]
                for key, parameter in (("weight", head.weight), ("bias", head.bias)):
                    kept = {
                        k: found[at] for k in ("step", "exp_avg", "exp_avg_sq") if (at := f"{name}/{key}/{k}") in found
                    }
                    if kept:
                        optimizer.state[parameter] = kept

    def _state(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, head in self._heads.items():
            for key, parameter in (("weight", head.weight), ("bias", head.bias)):
                found[f"{name}/{key}"] = parameter.detach()
                moments = self._optimizers[name].state.get(parameter, {})
                found |= {f"{name}/{key}/{k}": tensor for k, tensor in moments.items()}
        return found

    def _values(self, policy: str, states: Tensor) -> Tensor:
        values: Tensor = self._heads[policy](states).squeeze(-1)
        return values

    def _learn(self, policy: str, states: Tensor, targets: Tensor) -> None:
        optimizer = self._optimizers[policy]
        for _ in range(EPOCHS):
            optimizer.zero_grad()
            (self._values(policy, states) - targets).square().mean().backward()
            optimizer.step()
