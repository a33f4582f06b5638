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
from cotune.integrations.models.device_copies import to_device
from cotune.storage.token_figures import CandidateTokens
from cotune.trainer.learner.batching import lengths_of
from cotune.trainer.learner.dist import ProcessGroup
from cotune.trainer.learner.loss import Tokens, kept_by_mask, logit_gradients, row_weights
from cotune.trainer.learner.metric_sums import MetricSums
from cotune.trainer.learner.policy_model import PolicyModel


@dataclass(frozen=True)
class Update:
    """The data that the optimizer steps of one update share."""

    model: PolicyModel
    tokens: UpdateTokens
    passed: Sequence[bool]
    """[R] whether each row goes through the model. A row without an advantage only counts in the denominators."""
    weight: Tensor
    """[R] the share of each token of a row in the loss of its mini-batch."""
    sums: MetricSums


class UpdateTokens:
    """The response tokens of R rows, row after row, N in all. Tensors are on the CPU, but for `old`.

        rows        0      1    2
        tokens      a b c  d e  f
        row [N]     0 0 0  1 1  2      `indices_of([2, 0])` = 5 0 1 2

    `counted` [N] says which tokens count: they are not masked in their row and not rejected by the loss's mask. Other
    tokens have no gradient and are in no denominator and no metric. `has_advantage` [R] says which rows have an
    advantage other than 0.
    """

    def __init__(self, rows: Sequence[TrainRow], loss: LossSpec, advantages: Sequence[Floats] | None = None) -> None:
        """Flatten `rows` into tensors. `advantages` has the advantages of each row's tokens, if a critic has computed
        them. Without it, each token has the advantage of its row."""
        lengths = lengths_of(rows)
        self.rows = rows
        self.loss = loss
        self._starts = np.cumsum([0, *lengths])
        self.row = torch.arange(len(rows)).repeat_interleave(torch.tensor(lengths))
        """[N] the number of each token's row."""
        self.old: Tensor | None = None
        """[N] log pi before the update, on the learner's device. It is NaN (or None for all tokens) if no pass needs it
        before the first step."""
        self.sampler = _concatenate([array("f", row.logprobs) for row in rows])  # array reads a tuple fastest
        """[N] log pi of the sampler, which drew the tokens."""
        if advantages is None:
            self.has_advantage = [bool(row.advantage) for row in rows]
            self._advantage = torch.tensor([row.advantage for row in rows], dtype=torch.float32)[self.row]
        else:
            self.has_advantage = [bool(row_advantages.any()) for row_advantages in advantages]
            self._advantage = _concatenate(advantages)
        self._temperature = torch.tensor([row.temperature for row in rows], dtype=torch.float32)
        self._exploration = torch.tensor([row.exploration for row in rows], dtype=torch.float32)
        unmasked = np.ones(len(self.row), np.bool_)
        for row, start, end in zip(rows, self._starts[:-1], self._starts[1:], strict=True):
            if row.loss_mask:
                unmasked[start:end] = row.loss_mask
        self._unmasked = torch.from_numpy(unmasked)
        self.counted = self._unmasked
        self._figures = torch.full((2, len(self.row)), torch.nan)  # [log pi, entropy] of each token, once computed
        self._pending_figures: list[tuple[Tensor, Tensor]] = []
        self._teacher = _teacher_logprobs(rows) if loss.kl and loss.kl_to != "untrained" else None

    def indices_of(self, rows: Sequence[int]) -> Tensor:
        """Return the indices of these rows' tokens in the flat tensors, in the order of `rows`."""
        return torch.cat([torch.arange(self._starts[row], self._starts[row + 1]) for row in rows])

    def counted_indices_of(self, rows: Sequence[int]) -> Tensor:
        """Return the indices of these rows' tokens that count, in the order of `rows`."""
        indices = self.indices_of(rows)
        return indices[self.counted[indices]]

    def set_old(self, old: Tensor | None) -> None:
        """Store `old`, log pi before the update. If the loss has a mask, the tokens that it rejects, because `old`
        differs too much from the sampler's log pi, do not count any more."""
        self.old = old
        if self.loss.mask == "none" or old is None or not self.counted.any():
            return
        mismatch = old.cpu() - self.sampler
        # Start from the tokens that the rows' own masks leave in, not from those of an earlier call. The loss's mask
        # then rejects some of them.
        unmasked = self._unmasked
        self.counted = unmasked.clone()
        self.counted[unmasked] = kept_by_mask(self.loss, mismatch[unmasked], self.row[unmasked])

    @cached_property
    def lengths(self) -> Tensor:
        """The number of tokens of each row that count, [R]. Call `set_old` first, which decides which tokens count."""
        return self._per_row(self.counted)

    @cached_property
    def trajectory_lengths(self) -> Tensor:
        """The number of tokens that count in the trajectory of each row, [R]."""
        _, trajectory_numbers = np.unique([row.trajectory or row.id for row in self.rows], return_inverse=True)
        trajectory_of_row = torch.from_numpy(trajectory_numbers)
        # There are at most as many trajectories as rows.
        sums = torch.zeros(len(self.rows), dtype=torch.int64).index_add(0, trajectory_of_row, self.lengths)
        return sums[trajectory_of_row]

    def weights(self, batches: Sequence[Sequence[int]]) -> Tensor:
        """Return the weight of each token of a row in the loss of its mini-batch, [R]; 0 for rows in no mini-batch.

        `batches` has the numbers of the rows of each mini-batch. With `balance = "equal"`, the rows of each role are
        scaled.
        """
        weight = torch.zeros(len(self.rows))
        for batch in batches:
            rows = torch.tensor(batch)
            weight[rows] = row_weights(self.loss, self.lengths[rows], self.trajectory_lengths[rows])
        if self.loss.balance == "equal":
            weight *= self._role_factors(weight)
        return weight

    def _role_factors(self, weight: Tensor) -> Tensor:
        """Return factors for the weights of rows, [R], that give the gradients of all roles the same length.

        `weight` [R] has the weights without the factors. A role without an advantage keeps its weight.
        """
        # Estimate the gradients of the first optimizer step before it is computed. The policy ratio is 1 there, and the
        # sampler's log-probabilities are close to the policy's.
        slope = weight[self.row] * self._advantage
        gradients = logit_gradients(slope, self.sampler, self._temperature[self.row]).double()
        squares = torch.where(self.counted, gradients.square(), 0.0)  # [N]

        # The length of a role's gradient is about the root of the sum of these squares: see `MetricSums`.
        roles = sorted({row.role for row in self.rows})
        role_of_row = torch.tensor([roles.index(row.role) for row in self.rows])
        lengths = torch.zeros(len(roles), dtype=torch.float64).index_add(0, role_of_row[self.row], squares).sqrt()
        factors = torch.ones(len(roles))
        has_gradient = lengths > 0
        if has_gradient.any():
            factors[has_gradient] = (lengths[has_gradient].mean() / lengths[has_gradient]).float()
        return factors[role_of_row]

    def temperatures(self, rows: Sequence[int]) -> Tensor:
        """Return the sampling temperature of the tokens of these rows that count, [N], on the CPU."""
        return self._temperature[self.row[self.counted_indices_of(rows)]]

    def masked_share(self) -> dict[str, float]:
        """Return the metric `masked_share`, the share of tokens that the loss's mask rejects. Tokens that a row's own
        mask leaves out are not counted. With several roles, also return the share of each role, as
        `<role>/masked_share`."""
        unmasked_of_row = self._per_row(self._unmasked).tolist()
        counted_of_row = self.lengths.tolist()
        unmasked_by_role = Counter[str]()
        counted_by_role = Counter[str]()
        for row, unmasked, counted in zip(self.rows, unmasked_of_row, counted_of_row, strict=True):
            unmasked_by_role[row.role] += unmasked
            counted_by_role[row.role] += counted
        shares = {"masked_share": 1.0 - counted_by_role.total() / max(unmasked_by_role.total(), 1)}
        if len(unmasked_by_role) > 1:
            for role in sorted(unmasked_by_role):
                shares[f"{role}/masked_share"] = 1.0 - counted_by_role[role] / max(unmasked_by_role[role], 1)
        return shares

    def of_pass(
        self, rows: Sequence[int], weight: Tensor, *, new: Tensor, entropy: Tensor, untrained: Tensor | None
    ) -> Tokens:
        """Return the tokens of a pass over `rows` that count, N of them.

        `weight` [R] is the share of each token of a row in the loss. `new`, `entropy` and `untrained` [tokens of the
        pass] are the results of the pass, on its device: log-probabilities and entropies under the trained weights, and
        log-probabilities under the untrained ones.
        """
        # 1. The tokens that count, as indices into the tensors of the update [N], and the number of each one's row.
        device = new.device
        tokens_of_pass = self.indices_of(rows)
        counted = self.counted[tokens_of_pass]
        at = tokens_of_pass[counted]
        row_in_pass = torch.arange(len(rows)).repeat_interleave(self.lengths[torch.tensor(rows)])

        # 2. The same tokens as indices into the results of the pass [N]. They are computed on the CPU: a mask on the
        # GPU would make the host wait for the number of tokens.
        at_in_pass = to_device(counted.nonzero().squeeze(1), device)
        new_counted = new.index_select(0, at_in_pass)
        current = new_counted.detach()
        # Where log pi before the update is not stored, the weights have not changed since: it is the current one.
        old = current
        if self.old is not None:
            stored = self.old.index_select(0, to_device(at, self.old.device))
            old = torch.where(stored.isnan(), current, stored)

        # 3. The log-probabilities that the KL penalty compares with: the teacher's, or the untrained policy's.
        reference: Tensor | None = None
        if self._teacher is not None:
            reference = to_device(self._teacher[at], device)
        elif untrained is not None:
            reference = untrained.index_select(0, at_in_pass)
        return Tokens(
            new=new_counted,
            sampler=to_device(self.sampler[at], device),
            advantage=to_device(self._advantage[at], device),
            exploration=to_device(self._exploration[self.row[at]], device),
            weight=to_device(weight[self.row[at]], device),
            row=to_device(row_in_pass, device),
            old=old,
            entropy=entropy.index_select(0, at_in_pass),
            reference=reference,
            rows=len(rows),
        )

    def add_figures(self, rows: Sequence[int], tokens: Tokens) -> None:
        """Store log pi and entropy of the tokens of a pass over `rows` that count, which are `tokens`."""
        if tokens.entropy is not None:
            figures = torch.stack([tokens.new, tokens.entropy]).detach().float()
            self._pending_figures.append((self.counted_indices_of(rows), figures))

    def gather_figures(self, group: ProcessGroup) -> dict[str, CandidateTokens]:
        """Return the figures of all tokens that `add_figures` has stored on any rank, by the id of their row. Rows
        without such a token are left out."""
        # Copied only now and all at once, so that the host waits for the GPU once in an update, and not in each pass.
        if self._pending_figures:
            indices, values = zip(*self._pending_figures, strict=True)
            self._figures[:, torch.cat(indices)] = torch.cat(values, 1).cpu()
            self._pending_figures.clear()

        # Each token is computed by one rank at most. The others add 0 to its figures.
        computed_here = ~self._figures[0].isnan()
        figures_here = torch.where(computed_here, self._figures, 0.0)
        summed = group.sum(torch.cat([figures_here, computed_here[None].float()])).cpu()  # [3, N]
        new, entropy, ranks = (values.numpy() for values in summed)
        gaps = np.where(ranks > 0, new - self.sampler.numpy(), np.nan).astype(np.float16)
        entropies = np.where(ranks > 0, entropy, np.nan).astype(np.float16)

        figures: dict[str, CandidateTokens] = {}
        for row, start, end in zip(self.rows, self._starts[:-1], self._starts[1:], strict=True):
            if not np.isnan(gaps[start:end]).all():
                figures[row.id] = CandidateTokens(gaps[start:end], entropies[start:end])
        return figures

    def _per_row(self, selected: Tensor) -> Tensor:
        """Count the tokens of each row for which `selected` [N] is true, [R]."""
        return torch.bincount(self.row[selected], minlength=len(self.rows))


def _concatenate(parts: Sequence[Sequence[float] | npt.NDArray[np.floating]]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.asarray(part, np.float32) for part in parts]))


def _teacher_logprobs(rows: Sequence[TrainRow]) -> Tensor:
    """[tokens] log pi_teacher of each response token, rows in order, float32, in nats. Raises GroupError."""
    for row in rows:
        if len(row.reference) != len(row.response_ids):
            raise GroupError(f"No teacher has scored row {row.id} of role {row.role!r}.", "Set distill.teacher.")
    return _concatenate([row.reference for row in rows])
