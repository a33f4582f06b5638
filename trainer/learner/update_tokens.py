"""The response tokens of an update, in flat tensors that are made once. Every pass selects its tokens from them."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cotune.algorithms.recipes import LossSpec
from cotune.algorithms.samples import Floats, TrainRow
from cotune.errors import GroupError
from cotune.storage.token_figures import CandidateTokens
from cotune.trainer.learner.batching import lengths_of
from cotune.trainer.learner.device import to_device
from cotune.trainer.learner.dist import ProcessGroup
from cotune.trainer.learner.loss import Tokens, kept_by_mask, logit_gradients, row_weights
from cotune.trainer.learner.metric_sums import MetricSums
from cotune.trainer.learner.policy_model import PolicyModel


@dataclass(frozen=True)
class Update:
    """The data that the optimizer steps of one update share. `passed` [R] says which rows go through the model: a row
    without an advantage only counts in the denominators. `weight` [R] is the share of each token of a row in the loss
    of its mini-batch."""

    model: PolicyModel
    tokens: UpdateTokens
    passed: Sequence[bool]
    weight: Tensor
    sums: MetricSums


class UpdateTokens:
    """The response tokens of R rows, row after row, N in all. Tensors are on the CPU, but for `old`.

        rows        0      1    2
        tokens      a b c  d e  f
        row [N]     0 0 0  1 1  2      `at([2, 0])` = 5 0 1 2

    `advantages` has the advantages of each row's tokens, if a critic has computed them; else each token has the
    advantage of its row. `counted` [N] says which tokens count: they are not masked in their row and not rejected by
    the loss's mask. Other tokens have no gradient and are in no denominator and no metric. `moves` [R] says which rows
    have an advantage.
    """

    def __init__(self, rows: Sequence[TrainRow], loss: LossSpec, advantages: Sequence[Floats] | None = None) -> None:
        """Flatten `rows` into tensors. `advantages` [R] has an array of the advantages of each row's tokens, if a
        critic computed them."""
        lengths = lengths_of(rows)
        self.rows = rows
        self.old: Tensor | None = None
        """[N] log pi before the update, on the learner's device. It is NaN (or None for all tokens) if no pass needs it
        before the first step."""
        self.loss = loss
        self._starts = np.cumsum([0, *lengths])
        self.row = torch.arange(len(rows)).repeat_interleave(torch.tensor(lengths))
        self.sampler = _concatenate([array("f", row.logprobs) for row in rows])  # reads a tuple faster than numpy
        if advantages is None:
            self.moves = [bool(row.advantage) for row in rows]
            self._advantage = torch.tensor([row.advantage for row in rows], dtype=torch.float32)[self.row]
        else:
            self.moves = [bool(row_advantages.any()) for row_advantages in advantages]
            self._advantage = _concatenate(advantages)
        self._temperature = torch.tensor([row.temperature for row in rows], dtype=torch.float32)
        self._exploration = torch.tensor([row.exploration for row in rows], dtype=torch.float32)
        unmasked = np.ones(len(self.row), np.bool_)
        for number, row in enumerate(rows):
            if row.loss_mask:
                unmasked[self._starts[number] : self._starts[number + 1]] = row.loss_mask
        self._unmasked = torch.from_numpy(unmasked)
        self.counted = self._unmasked
        self._figures = torch.full((2, len(self.row)), torch.nan)  # [log pi, entropy] of each token, once computed
        self._pending_figures: list[tuple[Tensor, Tensor]] = []
        self._teacher = _teacher_logprobs(rows) if loss.kl and loss.kl_to != "untrained" else None

    def at(self, rows: Sequence[int]) -> Tensor:
        """The places of these rows' tokens in the flat tensors, in the order of `rows`."""
        return torch.cat([torch.arange(*self._starts[i : i + 2]) for i in rows])

    def compare(self, old: Tensor | None) -> None:
        """Store log pi before the update, `old`, and leave out the tokens that the loss's mask rejects."""
        self.old = old
        if self.loss.mask != "none" and old is not None and self.counted.any():
            mismatch = old.cpu() - self.sampler
            unmasked = self._unmasked  # the tokens that the rows' own masks leave in
            self.counted = unmasked.clone()
            self.counted[unmasked] = kept_by_mask(self.loss, mismatch[unmasked], self.row[unmasked])

    @cached_property
    def lengths(self) -> Tensor:
        """The number of tokens of each row that count, [R]. Call `compare` first."""
        return self._per_row(self.counted)

    @cached_property
    def trajectory_lengths(self) -> Tensor:
        """The number of tokens that count in the trajectory of each row, [R]."""
        _, numbers = np.unique([row.trajectory or row.id for row in self.rows], return_inverse=True)
        trajectory = torch.from_numpy(numbers)
        return torch.zeros(len(self.rows), dtype=torch.int64).index_add(0, trajectory, self.lengths)[trajectory]

    def weights(self, batches: Sequence[Sequence[int]]) -> Tensor:
        """Return the weight of each token of a row in the loss of its mini-batch, [R], and 0 for rows in none.

        `batches` has the rows of each mini-batch. With `balance = "equal"` the rows of each role are scaled.
        """
        weight = torch.zeros(len(self.rows))
        for batch in batches:
            places = torch.tensor(batch)
            weight[places] = row_weights(self.loss, self.lengths[places], self.trajectory_lengths[places])
        if self.loss.balance == "equal":
            weight *= self._role_factors(weight)
        return weight

    def _role_factors(self, weight: Tensor) -> Tensor:
        """Return the factors by which `weight` [R] gives the gradients of all roles the same length, [R].

        A role without an advantage keeps its weight.
        """
        # The gradients of the first optimizer step, by what is known before it: there the policy ratio is 1, and the
        # sampler's log-probabilities are about the policy's own.
        slope = weight[self.row] * self._advantage
        squared = logit_gradients(slope, self.sampler, self._temperature[self.row]).double().square()
        names = sorted({row.role for row in self.rows})
        role = torch.tensor([names.index(row.role) for row in self.rows])
        counted_squares = torch.where(self.counted, squared, 0.0)
        lengths = torch.zeros(len(names), dtype=torch.float64).index_add(0, role[self.row], counted_squares).sqrt()
        factors = torch.ones(len(names))
        learning = lengths > 0
        if learning.any():
            factors[learning] = (lengths[learning].mean() / lengths[learning]).float()
        return factors[role]

    def temperatures(self, rows: Sequence[int]) -> Tensor:
        """Return the sampling temperature of the tokens of these rows that count, [N], on the CPU."""
        at = self.at(rows)
        return self._temperature[self.row[at[self.counted[at]]]]

    def masked_share(self) -> dict[str, float]:
        """Return `masked_share`: the share of tokens that the loss rejects, of the tokens that the rows' masks leave
        in. With several roles, each role also has one, as `<role>/masked_share`."""
        unmasked = Counter[str]()
        counted = Counter[str]()
        unmasked_of_rows = self._per_row(self._unmasked).tolist()
        for number, (row, length) in enumerate(zip(self.rows, self.lengths.tolist(), strict=True)):
            unmasked[row.role] += unmasked_of_rows[number]
            counted[row.role] += length
        shares = {"masked_share": 1.0 - counted.total() / max(unmasked.total(), 1)}
        if len(unmasked) > 1:
            for role in sorted(unmasked):
                shares[f"{role}/masked_share"] = 1.0 - counted[role] / max(unmasked[role], 1)
        return shares

    def of_pass(
        self, rows: Sequence[int], weight: Tensor, *, new: Tensor, entropy: Tensor, untrained: Tensor | None
    ) -> Tokens:
        """Return the tokens of a pass over `rows` that count. `weight` [R] is each token's share of the loss, by its
        row. `new`, `entropy` and `untrained` have all tokens of the pass, in its order, on its device."""
        device = new.device
        tokens_of_pass = self.at(rows)
        counted = self.counted[tokens_of_pass]
        at = tokens_of_pass[counted]
        row = torch.arange(len(rows)).repeat_interleave(self.lengths[torch.tensor(rows)])

        # The places are computed on the CPU: a mask on the GPU would make the host wait for their number.
        places = to_device(counted.nonzero().squeeze(1), device)
        new = new.index_select(0, places)
        entropy = entropy.index_select(0, places)
        current = new.detach()
        old = current if self.old is None else self.old.index_select(0, to_device(at, self.old.device))
        if self._teacher is not None:
            reference: Tensor | None = to_device(self._teacher[at], device)
        else:
            reference = None if untrained is None else untrained.index_select(0, places)
        return Tokens(
            new=new,
            sampler=to_device(self.sampler[at], device),
            advantage=to_device(self._advantage[at], device),
            exploration=to_device(self._exploration[self.row[at]], device),
            weight=to_device(weight[self.row[at]], device),
            row=to_device(row, device),
            old=torch.where(old.isnan(), current, old),
            entropy=entropy,
            reference=reference,
            rows=len(rows),
        )

    def note(self, rows: Sequence[int], tokens: Tokens) -> None:
        """Store the figures of a pass for its tokens that count, for `seen`."""
        at = self.at(rows)
        if tokens.entropy is not None:
            self._pending_figures.append(
                (at[self.counted[at]], torch.stack([tokens.new, tokens.entropy]).detach().float())
            )

    def seen(self, group: ProcessGroup) -> dict[str, CandidateTokens]:
        """Return the figures of the tokens, by the id of their row. Rows that no pass has computed are left out."""
        for at, values in self._pending_figures:  # copied only now, so that no pass has waited for the GPU
            self._figures[:, at] = values.cpu()
        self._pending_figures.clear()
        # Each rank has computed some tokens: add up their figures and the number of ranks.
        computed = ~self._figures[0].isnan()
        summed = group.sum(torch.cat([torch.where(computed, self._figures, 0.0), computed[None].float()]))
        new, entropy, count = (part.numpy() for part in summed.cpu())
        gaps = np.where(count > 0, new - self.sampler.numpy(), np.nan).astype(np.float16)
        entropies = np.where(count > 0, entropy, np.nan).astype(np.float16)
        parts = zip(np.split(gaps, self._starts[1:-1]), np.split(entropies, self._starts[1:-1]), strict=True)
        figures: dict[str, CandidateTokens] = {}
        for row, (row_gaps, row_entropies) in zip(self.rows, parts, strict=True):
            if not np.isnan(row_gaps).all():
                figures[row.id] = CandidateTokens(row_gaps, row_entropies)
        return figures

    def _per_row(self, chosen: Tensor) -> Tensor:
        return torch.bincount(self.row[chosen], minlength=len(self.rows))


def _concatenate(parts: Sequence[Sequence[float] | npt.NDArray[np.floating]]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.asarray(part, np.float32) for part in parts]))


def _teacher_logprobs(rows: Sequence[TrainRow]) -> Tensor:
    """[tokens] log pi_teacher of each response token, rows in order, float32, in nats. Raises GroupError."""
    for row in rows:
        if len(row.reference) != len(row.response_ids):
            raise GroupError(f"Row {row.id} of role {row.role!r} was scored by no teacher.", "Set distill.teacher.")
    return _concatenate([row.reference for row in rows])
