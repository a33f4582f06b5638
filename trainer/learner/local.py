"""The learner of one process, which may be one rank of several that train the same weights."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cotune.algorithms.recipes import LossSpec
from cotune.algorithms.samples import TrainRow
from cotune.errors import ConfigError, GroupError, LearnerError, RunError
from cotune.policies import Policies
from cotune.sampling.protocol import Weights
from cotune.trainer.config.learner import FULL_LR, LORA_LR, LearnerSettings, check_anchor
from cotune.trainer.learner import files as files
from cotune.trainer.learner.batching import mini_batches, passes
from cotune.trainer.learner.dist import Ranks, SingleProcess, whole
from cotune.trainer.learner.gradient_checks import GradientChecks, check_optimizers
from cotune.trainer.learner.load import open_policy_models
from cotune.trainer.learner.loss import Tokens, policy_loss, token_weights, trusted
from cotune.trainer.learner.metric_sums import MetricSums
from cotune.trainer.learner.policy_model import PolicyModel


class LocalLearner:
    """Trains the policies of a run in this process. Methods may be called from any thread, one at a time runs.

    Ratio and correction: with `anchor` "trainer" the policy ratio is pi_train / pi_before_the_update, and each token
    weighs min(pi_before_the_update / pi_sampler, cap); with "sampler" it is pi_train / pi_sampler in all optimizer
    steps of an update.

    As one of several `ranks` it holds a part of every tensor and computes a part of the rows; all ranks call the same
    methods with the same rows, and all return the same.
    """

    def __init__(
        self,
        policies: Mapping[str, PolicyModel],
        settings: LearnerSettings,
        loss: LossSpec,
        ranks: Ranks | None = None,
    ) -> None:
        self._policies = dict(policies)
        self._settings = settings
        self._loss = loss
        self._ranks = ranks or SingleProcess()
        self._lock = threading.RLock()
        self._order = {name: torch.Generator().manual_seed(settings.seed) for name in self._policies}
        self._optimizers = {name: _optimizer(policy, settings) for name, policy in self._policies.items()}
        trainable = {name: policy.parameters() for name, policy in self._policies.items()}
        check_optimizers(trainable, self._optimizers)
        self._movement = {
            name: GradientChecks(parameters, self._optimizers[name], self._ranks, dtype=settings.dtype)
            for name, parameters in trainable.items()
        }

    @classmethod
    def open(cls, model: str, policies: Policies, settings: LearnerSettings, loss: LossSpec) -> LocalLearner:
        """Load `model` for every trained policy. Raises ConfigError for a model or loss that cannot be trained."""
        check_loss(loss, settings)
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        return cls(open_policy_models(model, policies, settings, reference=loss.kl > 0), settings, loss)

    def update(self, policy: str, rows: Sequence[TrainRow], *, lr_scale: float = 1.0) -> Mapping[str, float]:
        """All epochs and mini-batches of one step. Raises GroupError for unusable rows, LearnerError when the
        update does not train what it should.

        Where no token counts, the loss's mask having rejected them all, there is no optimizer step. A token that the
        row's grammar forced does not count either.

        Metrics are means over response tokens that count, over all optimizer steps: `loss` and `grad_norm` (before
        clipping) over steps; `clip_share`, `tis_clipped_share`, `entropy` (nats), `ratio_mean`, `ratio_max`; `kl` to
        the reference (k3, where the loss has that term); `sampler_gap_mean`, `sampler_gap_max` |log pi_train - log
        pi_sampler| and `sampler_kl` (k3) before the first optimizer step; `masked_share` of the tokens, rejected by the
        loss's mask and in no other figure; `tokens`, `rows`, `steps`, `skipped_steps` (gradient not finite),
        `idle_steps` (no gradient), `seconds`, `weight_norm`, `lr`. Token means per role as `<role>/<metric>` where the
        rows are of several roles.
        """
        started = time.perf_counter()
        with self._lock:
            check_rows(rows)
            model = self._model(policy)
            rows = model.drawn(rows)
            epochs = [self._mini_batches(policy, rows) for _ in range(self._settings.epochs)]
            old = self._anchor(model, rows, epochs)
            counted = self._counted(rows, old)
            used = [[i for i in batch if counted[i].any()] for epoch in epochs for batch in epoch]
            batches = [batch for batch in used if batch]
            trajectories = _trajectories(rows, counted)
            tally = MetricSums([row.role for row in rows])
            rejected = _rejected(rows, counted)
            if not batches:
                none = dict.fromkeys(("steps", "skipped_steps", "idle_steps"), 0.0)
                return {**rejected, **none, "rows": float(len(rows))}
            norms, losses = [], []
            for step, batch in enumerate(batches):
                loss = self._backward(model, rows, batch, old, counted, trajectories, tally, first=step == 0)
                norms.append(self._step(policy, lr_scale, moves=any(rows[i].advantage for i in batch)))
                losses.append(loss)
            losses = self._ranks.sum(torch.tensor(losses, dtype=torch.float64)).tolist()
            finite = [norm for norm in norms if np.isfinite(norm)]
            if not finite:
                raise LearnerError(
                    f"No gradient of this update of policy {policy!r} is finite.", "Lower learner.lr, or use float32."
                )
            rounding = self._movement[policy].after_update(policy)
            return {
                **tally.metrics(self._ranks),
                **rejected,
                **rounding,
                "loss": float(np.mean(losses)),
                "grad_norm": float(np.mean(finite)),
                "steps": float(len(batches)),
                "skipped_steps": float(len(norms) - len(finite)),
                "idle_steps": float(norms.count(0.0)) if self._settings.weight_decay == 0.0 else 0.0,
                "rows": float(len(rows)),
                "weight_norm": _norm(model),
                "lr": self._lr(model) * lr_scale,
                "seconds": time.perf_counter() - started,
            }

    def logprobs(self, policy: str, rows: Sequence[TrainRow]) -> list[npt.NDArray[np.float32]]:
        """log pi_train of each row's response tokens at the row's temperature, in nats, without gradients."""
        with self._lock:
            check_rows(rows)
            return [part.cpu().numpy() for part in self._logprobs(self._model(policy), rows, [range(len(rows))])]

    def weights(self, policy: str) -> Weights:
        """Trainable weights as fp32 arrays: PEFT state-dict names for a LoRA, model parameter names else."""
        with self._lock:
            return self._model(policy).weights(keep=self._ranks.rank == 0)

    def save(self, folder: Path) -> None:
        """Write `learner.json`, and weights, optimizer and row order per policy (see `learner_files`)."""
        with self._lock:
            if self._ranks.rank == 0:
                files.write_identity(folder, [policy.spec for policy in self._policies.values()])
            self.save_policies(folder)

    def save_policies(self, folder: Path) -> None:
        """What `save` writes of each policy."""
        with self._lock:
            for name, policy in self._policies.items():
                files.write_weights(folder, policy, self._ranks)
                files.write_optimizer(folder, policy, self._optimizers[name])
                if self._ranks.rank == 0:
                    files.write_progress(folder, policy, self._order[name], self._movement[name].steps)

    def load(self, folder: Path, new: Collection[str] = ()) -> None:
        """Restore what `save` wrote, here or in a learner of several processes, but for policies that are `new`. Raises
        RunError when it is missing, broken, or of other policies."""
        files.check_identity(folder, [p.spec for name, p in self._policies.items() if name not in new])
        self.load_policies(folder, new)

    def load_policies(self, folder: Path, new: Collection[str] = ()) -> None:
        """What `load` restores of each policy."""
        with self._lock, files.restoring(folder):
            for name, policy in self._policies.items():
                if name in new:
                    continue
                files.read_weights(folder, policy)
                files.read_optimizer(folder, policy, self._optimizers[name])
                self._movement[name].steps = files.read_progress(folder, policy, self._order[name])
                if self._movement[name].steps and not self._optimizers[name].state:
                    raise RunError(f"{folder} holds no optimizer state of {name!r}.", "Use another checkpoint.")

    def _mini_batches(self, policy: str, rows: Sequence[TrainRow]) -> list[list[int]]:
        return mini_batches(rows, self._settings.mini_batch, self._order[policy])

    def _micro_batches(self, model: PolicyModel, rows: Sequence[TrainRow], batch: Sequence[int]) -> list[list[int]]:
        """This rank's passes over a batch; an empty one keeps the others company."""
        budget, ranks = self._settings.micro_batch_tokens, self._ranks
        return passes(rows, batch, budget, shared=model.shares_prompts, rank=ranks.rank, size=ranks.size)

    def _anchor(
        self, model: PolicyModel, rows: Sequence[TrainRow], epochs: Sequence[Sequence[Sequence[int]]]
    ) -> list[Tensor] | None:
        """log pi before the update, where it has to be known before the first optimizer step.

        Computed in the passes of the first epoch: in bfloat16 other passes round otherwise.
        """
        several = len(epochs) > 1 or len(epochs[0]) > 1
        needed = self._settings.anchor == "trainer" and (several or self._loss.mask != "none")
        return self._logprobs(model, rows, epochs[0]) if needed else None

    def _counted(self, rows: Sequence[TrainRow], old: Sequence[Tensor] | None) -> list[Tensor]:
        """Which response tokens of each row count: neither masked in the row nor rejected by the loss. On the CPU."""
        counted = [torch.tensor(row.loss_mask or (True,) * len(row.response_ids)) for row in rows]
        if self._loss.mask == "none" or old is None:
            return counted
        kept = torch.cat(counted)
        row = torch.arange(len(rows)).repeat_interleave(torch.tensor([len(r.response_ids) for r in rows]))
        mismatch = torch.cat([values.cpu() for values in old]) - _sampler_logprobs(rows)
        if kept.any():
            kept[kept.clone()] = trusted(self._loss, mismatch[kept], row[kept])
        return list(kept.split([len(r.response_ids) for r in rows]))

    def _logprobs(self, model: PolicyModel, rows: Sequence[TrainRow], batches: Sequence[Sequence[int]]) -> list[Tensor]:
        """Of all rows, batch by batch: each rank computes its own and adds them to the others'."""
        lengths = [len(row.response_ids) for row in rows]
        found = torch.zeros(sum(lengths), device=model.device)
        parts = found.split(lengths)
        for micro in [micro for batch in batches for micro in self._micro_batches(model, rows, batch)]:
            values = model.logprobs([rows[i] for i in micro])
            for index, value in zip(micro, values.split([lengths[i] for i in micro]) if micro else (), strict=True):
                parts[index].copy_(value)
        return list(self._ranks.sum(found).split(lengths))

    def _backward(
        self,
        model: PolicyModel,
        rows: Sequence[TrainRow],
        batch: Sequence[int],
        old: Sequence[Tensor] | None,
        counted: Sequence[Tensor],
        trajectories: Tensor,
        tally: MetricSums,
        *,
        first: bool,
    ) -> float:
        """Gradients of one mini-batch; returns this rank's part of its loss."""
        lengths = torch.tensor([int(counted[i].sum()) for i in batch])
        weights = token_weights(self._loss, lengths, trajectories[torch.tensor(batch)])
        shares = dict(zip(batch, weights.split(lengths.tolist()), strict=True))
        total = 0.0
        micros = self._micro_batches(model, rows, batch)
        for number, micro in enumerate(micros):
            part = [rows[i] for i in micro]
            reference = model.reference_logprobs(part) if self._loss.kl else None
            new, entropy = model.token_logprobs(part)
            model.scorer.reduce_next(number == len(micros) - 1)
            if not micro:
                (new.sum() * 0.0).backward()
                continue
            anchor = None
            if self._settings.anchor == "trainer":
                anchor = new.detach() if old is None else torch.cat([old[i] for i in micro])
            count = [counted[i] for i in micro]
            tokens = _tokens(part, count, torch.cat([shares[i] for i in micro]), new, entropy, anchor, reference)
            parts = policy_loss(self._loss, tokens)
            parts.loss.backward()
            total += parts.loss.item()
            tally.add(micro, tokens, parts, first=first)
        return total

    def _step(self, policy: str, lr_scale: float, *, moves: bool) -> float:
        """One optimizer step on the gradients at hand; returns their norm. A non-finite one is not applied, nor one of
        zero, which moves nothing by momentum either; but weight decay acts."""
        model, optimizer = self._policies[policy], self._optimizers[policy]
        norm = _clip([p for p in model.parameters().values() if p.grad is not None], self._settings.grad_clip)
        if np.isfinite(norm):
            for group in optimizer.param_groups:
                group["lr"] = self._lr(model) * lr_scale
            watch = moves and lr_scale > 0 and bool(self._movement[policy].pending)
            if watch:
                self._movement[policy].before_step()
            if norm > 0.0 or self._settings.weight_decay > 0.0:
                optimizer.step()
            if watch:
                self._movement[policy].after_step()
        optimizer.zero_grad(set_to_none=True)
        return norm

    def _lr(self, model: PolicyModel) -> float:
        return _default_lr(model) if self._settings.lr is None else self._settings.lr

    def _model(self, policy: str) -> PolicyModel:
        if policy not in self._policies:
            raise ConfigError("policy", policy, f"a trained policy: {sorted(self._policies)}")
        return self._policies[policy]


def _optimizer(model: PolicyModel, settings: LearnerSettings) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        list(model.parameters().values()),
        lr=_default_lr(model) if settings.lr is None else settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=model.device.type in ("cpu", "cuda"),
    )


def _default_lr(model: PolicyModel) -> float:
    return LORA_LR if model.spec.kind == "lora" else FULL_LR


def _clip(parameters: Sequence[Tensor], limit: float) -> float:
    """Scale the gradients to an L2 norm of at most `limit` (0: as they are); returns the norm that they had."""
    if not parameters:
        return 0.0
    norm = whole(torch.nn.utils.get_total_norm([p.grad for p in parameters]))
    torch.nn.utils.clip_grads_with_norm_(parameters, limit or float("inf"), norm)
    return float(norm)


def _norm(model: PolicyModel) -> float:
    return float(whole(torch.nn.utils.get_total_norm([p.detach() for p in model.parameters().values()])))


def _tokens(
    rows: Sequence[TrainRow],
    counted: Sequence[Tensor],
    share: Tensor,
    new: Tensor,
    entropy: Tensor,
    old: Tensor | None,
    reference: Tensor | None,
) -> Tokens:
    """The tokens of `rows` that count; `share` is of these, the other tensors are of all."""
    count = torch.cat(list(counted))
    index = torch.arange(len(rows)).repeat_interleave(torch.tensor([len(row.response_ids) for row in rows]))[count]
    advantage = torch.tensor([row.advantage for row in rows], dtype=torch.float32)[index]
    there = count.to(new.device)
    return Tokens(
        new=new[there],
        sampler=_sampler_logprobs(rows)[count].to(new.device),
        advantage=advantage.to(new.device),
        weight=share.to(new.device),
        row=index.to(new.device),
        old=None if old is None else old[there],
        entropy=entropy[there],
        reference=None if reference is None else reference[there],
    )


def _sampler_logprobs(rows: Sequence[TrainRow]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.asarray(row.logprobs, np.float32) for row in rows]))


def _trajectories(rows: Sequence[TrainRow], counted: Sequence[Tensor]) -> Tensor:
    """[rows] tokens that count in the trajectory of each row."""
    sizes: Counter[str] = Counter()
    for row, tokens in zip(rows, counted, strict=True):
        sizes[row.trajectory or row.id] += int(tokens.sum())
    return torch.tensor([sizes[row.trajectory or row.id] for row in rows])


def _rejected(rows: Sequence[TrainRow], counted: Sequence[Tensor]) -> dict[str, float]:
    """`masked_share`: of the tokens that count in the rows, how many the loss rejects; also per role of several."""
    roles = [row.role for row in rows]
    could = torch.tensor([sum(row.loss_mask) if row.loss_mask else len(row.response_ids) for row in rows])
    left = torch.tensor([int(tokens.sum()) for tokens in counted])
    found = {"masked_share": 1.0 - float(left.sum()) / max(float(could.sum()), 1.0)}
    for role in sorted(set(roles)) if len(set(roles)) > 1 else ():
        own = torch.tensor([one == role for one in roles])
        found[f"{role}/masked_share"] = 1.0 - float(left[own].sum()) / max(float(could[own].sum()), 1.0)
    return found


def check_loss(loss: LossSpec, settings: LearnerSettings) -> None:
    """Raises ConfigError for a loss that lacks a number, or that the settings do not fit."""
    check_anchor(settings, loss)
    if loss.aggregation == "constant" and loss.constant_length is None:
        raise ConfigError("loss.constant_length", None, "the run's response limit, in tokens")


def check_rows(rows: Sequence[TrainRow]) -> None:
    """Raises GroupError for rows that cannot be trained on."""
    if not rows:
        raise GroupError("There are no rows to train on.")
    for row in rows:
        problem = None
        if not row.prompt_ids or not row.response_ids:
            problem = "has an empty prompt or response"
        elif len(row.logprobs) != len(row.response_ids):
            problem = f"has {len(row.logprobs)} sampler log-probabilities for {len(row.response_ids)} response tokens"
        elif row.loss_mask and len(row.loss_mask) != len(row.response_ids):
            problem = f"has a loss mask of {len(row.loss_mask)} for {len(row.response_ids)} response tokens"
        elif not row.temperature > 0:
            problem = f"was sampled at temperature {row.temperature}, where log-probabilities are not defined"
        elif not (np.isfinite(row.advantage) and np.isfinite(row.logprobs).all()):
            problem = "has a non-finite advantage or log-probability"
        if problem:
            raise GroupError(f"Row {row.id} of role {row.role!r} {problem}.", "Leave it out of training.")
