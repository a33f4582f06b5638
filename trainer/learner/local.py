"""The learner of one process, which may be one rank of several that train the same weights.

update ── the rows of one policy in one step of training
  └ mini-batch ── rows of one optimizer step, in another order in each update
      └ pass (micro-batch) ── rows that go through the model at once; gradients add up over passes
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cotune.algorithms.recipes import LossSpec
from cotune.algorithms.samples import Floats, TrainRow
from cotune.config.learner import LearnerSettings
from cotune.errors import ConfigError, LearnerError, RunError
from cotune.integrations.models.bfloat16 import LARGE
from cotune.records.policies import Policies
from cotune.sampling.protocol import Weights
from cotune.storage.token_figures import CandidateTokens
from cotune.trainer.config.learner import PolicyTraining, check_losses
from cotune.trainer.learner import files, torch_trace
from cotune.trainer.learner.batching import (
    PassPlan,
    check_rows,
    lengths_of,
    mini_batches,
    passes_of_rank,
    tokens_of,
)
from cotune.trainer.learner.critic import Critic
from cotune.trainer.learner.device import to_device
from cotune.trainer.learner.dist import ProcessGroup, SingleProcess, clip_gradients, total_norm
from cotune.trainer.learner.gradient_checks import GradientChecks, check_optimizers
from cotune.trainer.learner.load import needing_untrained
from cotune.trainer.learner.loss import logit_gradients, policy_loss
from cotune.trainer.learner.memory.optimizer import build_optimizer, check_hardware, learning_rate
from cotune.trainer.learner.memory.pass_size import PassSizes, giving_back
from cotune.trainer.learner.memory.products import open_joined
from cotune.trainer.learner.metric_sums import MetricSums
from cotune.trainer.learner.mfu import model_utilization
from cotune.trainer.learner.pass_inputs import PassInputs, prepared_ahead
from cotune.trainer.learner.policy_model import PolicyModel
from cotune.trainer.learner.update_tokens import Update, UpdateTokens

Batches = Sequence[Sequence[int]]


CPU_THREADS = torch.get_num_threads()
"""Torch's own number, the cores or OMP_NUM_THREADS, from before a learner of this process has changed it."""


def use_threads_for(models: Mapping[str, PolicyModel], settings: LearnerSettings) -> None:
    """Let torch compute with one thread on the CPU if the models are small: their passes are too short to divide.

    For others it has all threads, also after a run in this process whose models were small.
    """
    threads = settings.threads
    if threads is None:
        small = all(_trainable_parameters(model) < LARGE for model in models.values())
        threads = 1 if small else CPU_THREADS
    torch.set_num_threads(threads)


def _batches_with_tokens(batches: Batches, lengths: Sequence[int]) -> list[list[int]]:
    """The mini-batches without rows that have no counted token, and without mini-batches that have no other row."""
    with_tokens = []
    for batch in batches:
        rows = [i for i in batch if lengths[i]]
        if rows:
            with_tokens.append(rows)
    return with_tokens


def _trainable_parameters(model: PolicyModel) -> int:
    return sum(parameter.numel() for parameter in model.network.parameters())


@dataclass
class OptimizerSteps:
    """The optimizer steps of an update, one for each mini-batch: the norms of their gradients (0 for a step without
    any), this rank's part of their losses [steps], and the number of steps with activation checkpointing."""

    norms: list[float]
    losses: Tensor
    checkpointed: int = 0


class LocalLearner:
    """Trains the policies of a run in this process. Methods may be called from any thread, one at a time runs.

    The policy ratio is pi_train / pi_before_the_update; a token weighs min(pi_before_the_update / pi_sampler, cap).

    In a process group of several it holds a shard of every tensor and computes a part of the rows; all ranks call the
    same methods with the same rows, and all return the same.
    """

    def __init__(
        self,
        policies: Mapping[str, PolicyModel],
        settings: LearnerSettings,
        loss: LossSpec,
        group: ProcessGroup | None = None,
        own: Mapping[str, PolicyTraining] = {},
        seed: int = 0,
    ) -> None:
        """Build an optimizer and its checks for each policy, and measure how many tokens fit into a pass.

        `settings` and `loss` hold for all policies that have no entry in `own`. `seed` orders the rows of updates.
        """
        self._policies = dict(policies)
        self._methods = methods = {name: own.get(name, PolicyTraining(settings, loss)) for name in policies}
        self._group = group or SingleProcess()
        self._lock = threading.RLock()
        self._profiler: torch.profiler.profile | None = None
        self._seen: dict[str, Mapping[str, CandidateTokens]] = {}
        self._order = {name: torch.Generator().manual_seed(seed) for name in policies}
        self._optimizers = {name: build_optimizer(policy, methods[name].settings) for name, policy in policies.items()}
        self._critic = Critic({name: (p.width, methods[name].loss) for name, p in policies.items()}, self._group)
        self._passes = PassSizes(self._policies, settings, self._group, self._optimizers)
        # After the passes were measured: small trees are padded for FlexAttention, which keeps as much per token.
        for policy in self._policies.values():
            policy.choose_attention(self._group)
        trainable = {name: policy.parameters() for name, policy in policies.items()}
        check_optimizers(trainable, self._optimizers)
        self._gradient_checks = {
            name: GradientChecks(parameters, self._optimizers[name], self._group, dtype=settings.precision)
            for name, parameters in trainable.items()
        }

    @classmethod
    def open(
        cls,
        model: str,
        policies: Policies,
        settings: LearnerSettings,
        loss: LossSpec,
        own: Mapping[str, PolicyTraining] = {},
        seed: int = 0,
    ) -> LocalLearner:
        """Load the networks of all trained policies. `model` is the base of policies that name no other one.

        `own` has settings and loss of the policies that differ from `settings` and `loss`. `seed` decides the adapters'
        initial weights and the order of rows. Raises ConfigError.
        """
        check_losses(loss, *(method.loss for method in own.values()))
        check_hardware(settings)
        models = open_joined(model, policies, settings, needing_untrained(policies, loss, own), seed)
        use_threads_for(models, settings)
        return cls(models, settings, loss, own=own, seed=seed)

    def check(self, policy: str, rows: Sequence[TrainRow]) -> None:
        """Raises GroupError for unusable rows, LearnerError for one that does not fit into memory."""
        self._check_rows(policy, rows)
        self._passes[policy].check(rows)

    def _check_rows(self, policy: str, rows: Sequence[TrainRow]) -> None:
        """Refuse unusable rows before any of them is computed: all ranks have all rows here, and refuse the same."""
        check_rows(rows)
        self._model(policy).logprob_model.sampled_distribution.check(rows)

    def has_room(self, tokens: int) -> bool:
        """Whether passes of so many tokens fit into the memory that is free now, for every policy."""
        with self._lock:
            return self._passes.has_room(tokens)

    def update(self, policy: str, rows: Sequence[TrainRow], *, lr_scale: float = 1.0) -> Mapping[str, float]:
        """Train one policy. Raises as `check`, and LearnerError if nothing is trained.

        A critic, if the loss has one, computes the advantages before, and learns from the rows afterwards.
        """
        with self._lock:
            if self._model(policy).device.type == "cuda":
                self._passes.choose()  # a sampler on the same GPU may have gone to sleep, or has grown
            self.check(policy, rows)
            if policy not in self._critic:
                return self._train(policy, rows, lr_scale)
            # The critic also reads the privileged text of a row.
            rows_of_critic = [msgspec.structs.replace(row, prompt_ids=row.privileged + row.prompt_ids) for row in rows]
            states = self.states(policy, rows_of_critic)
            judged = self._critic.judge(policy, rows, states)
            figures = self._train(policy, rows, lr_scale, judged.advantages)
            return {**figures, **self._critic.learn(policy, states, judged)}

    def _train(
        self, policy: str, rows: Sequence[TrainRow], lr_scale: float, advantages: Sequence[Floats] | None = None
    ) -> Mapping[str, float]:
        """Train on each mini-batch of the rows once. `advantages` [tokens of the row] replace the rows' own ones.

        If the loss mask rejects every token, there is no optimizer step. Tokens that the row's grammar forced do not
        count either. Rows without an advantage count in the denominators of the loss, but no pass computes them, unless
        the loss learns from them (`LossSpec.moves_alone`).

        Metrics are means over the response tokens of passes that count, over all optimizer steps: `loss` and
        `grad_norm` (before clipping) over steps; `clip_share`, `tis_clipped_share`, `ratio_mean`, `ratio_max`;
        `entropy` (nats), which is also over the rows that no pass computes, by the sampler's -log pi; `kl` to the
        reference (k3, where the loss has that term); `sampler_gap_mean`, `sampler_gap_max` |log pi_train - log
        pi_sampler| and `sampler_kl` (k3) before the first optimizer step; `masked_share` of the tokens, rejected by the
        loss's mask and in no other figure; `tokens` and `rows` of passes; `steps`, `skipped_steps` (gradient not
        finite), `idle_steps` (no gradient), `seconds`, `weight_norm`, `lr`; `pass_tokens`, the most tokens of a pass,
        and `halved_passes`, how often memory ran out and halved it; `checkpointed_steps`, those with activation
        checkpointing; `total_tokens` of these rows with their prompts, `computed_tokens` that went through the model
        (fewer, as rows have beginnings in common), and `unshared_rows`, of which each was computed whole; on a
        known GPU `mfu`. Token means per role as `<role>/<metric>` where the rows are of several roles, and each role's
        share of the gradient as `<role>/gradient_share` (`MetricSums`).
        """
        started = time.perf_counter()
        model = self._model(policy)
        settings, loss = self._methods[policy]
        size = self._passes[policy]
        with giving_back(model):
            self._seen[policy] = {}
            # Divide the rows into mini-batches, and choose the rows that go through the model.
            rows = model.without_forced_tokens(rows)
            split = mini_batches(rows, settings.mini_batch, self._order[policy])
            tokens = UpdateTokens(rows, loss, advantages)
            passed = [loss.moves_alone or moves for moves in tokens.moves]
            halved_before = size.halved

            # Compute log pi before the first step. The loss's mask compares it with the sampler's.
            before = partial(self._logprobs_before, model, tokens, split, passed)
            tokens.compare(size.fitting(before, lambda: None))
            figures = {**tokens.masked_share(), "rows": float(sum(passed))}
            batches = _batches_with_tokens(split, tokens.lengths.tolist())
            if not batches:
                return {**figures, **dict.fromkeys(("steps", "skipped_steps", "idle_steps"), 0.0)}

            # Take one optimizer step for each mini-batch.
            sums = MetricSums([row.role for row in rows])
            update = Update(model, tokens, passed, tokens.weights(batches), sums)
            steps = self._take_steps(policy, update, batches, lr_scale)
            loss_mean = float(self._group.sum(steps.losses).mean())
            self._seen[policy] = tokens.seen(self._group)
            finite_norms = [norm for norm in steps.norms if np.isfinite(norm)]
            if not finite_norms:
                raise LearnerError(
                    f"No gradient of this update of policy {policy!r} is finite.", "Lower learner.lr, or use float32."
                )

            means = update.sums.metrics(self._group)
            seconds = time.perf_counter() - started
            total_tokens = sum(len(tokens_of(rows[i])) for i in itertools.chain(*batches) if passed[i])
            return {
                **means,
                **model_utilization(model, int(means["computed_tokens"]) // self._group.size, seconds),
                **figures,
                **self._gradient_checks[policy].after_update(policy),
                "loss": loss_mean,
                # Mini-batches without an advantage have the norm 0, which says nothing about the gradients.
                "grad_norm": float(np.mean([norm for norm in finite_norms if norm > 0.0] or [0.0])),
                "steps": float(len(batches)),
                "skipped_steps": float(len(batches) - len(finite_norms)),
                "idle_steps": float(steps.norms.count(0.0)),
                "weight_norm": total_norm(model.parameters().values()),
                "pass_tokens": float(size.tokens),
                "total_tokens": float(total_tokens),
                "unshared_rows": 0.0 if model.logprob_model.shares else figures["rows"],
                "halved_passes": float(size.halved - halved_before),
                "checkpointed_steps": float(steps.checkpointed),
                "lr": learning_rate(model, settings) * lr_scale,
                "seconds": seconds,
            }

    def _take_steps(
        self, policy: str, update: Update, batches: Sequence[Sequence[int]], lr_scale: float
    ) -> OptimizerSteps:
        """Take one optimizer step for each mini-batch, on the sum of the gradients of its passes."""
        size = self._passes[policy]
        steps = OptimizerSteps(
            norms=[0.0] * len(batches),
            losses=torch.zeros(len(batches), dtype=torch.float64, device=update.model.device),
        )
        for number, batch in enumerate(batches):
            self._count_skipped(update, batch)
            if not any(update.passed[i] for i in batch):
                continue  # an idle step: no row has an advantage
            backward = partial(self._backward, update, batch)
            steps.losses[number] = size.fitting(backward, self._optimizers[policy].zero_grad)
            steps.checkpointed += size.checkpointed
            moves = any(update.tokens.moves[i] for i in batch)
            steps.norms[number] = self._step(policy, lr_scale, moves=moves)
        return steps

    def logprobs(self, policy: str, rows: Sequence[TrainRow]) -> list[npt.NDArray[np.float32]]:
        """log pi_train of each row's response tokens at the row's temperature, in nats, without gradients."""
        with self._lock:
            self._check_rows(policy, rows)
            model = self._model(policy)
            one_batch = [range(len(rows))]
            logprobs = self._passes[policy].fitting(lambda: self._logprobs(model, rows, one_batch), lambda: None)
            return [part.numpy() for part in logprobs.cpu().split(lengths_of(rows))]

    def seen(self, policy: str) -> Mapping[str, CandidateTokens]:
        """The figures of each token from the first pass of the last update: see `Learner.seen`."""
        return self._seen.get(policy, {})

    def states(self, policy: str, rows: Sequence[TrainRow]) -> dict[int, Tensor]:
        """The last hidden states that predict the response of each row, [tokens of the row, hidden], by the row's
        number, on the CPU.

        Each rank computes a part of the rows, and has only these. Raises LearnerError for a row that does not fit into
        memory.
        """
        with self._lock:
            self._check_rows(policy, rows)
            self._passes[policy].check(rows)
            model = self._model(policy)
            one_batch = [range(len(rows))]
            states = partial(self._map_responses, model, rows, one_batch, lambda inputs: model.states(inputs).cpu())
            return self._passes[policy].fitting(lambda: dict(states()), lambda: None)

    def weights(self, policy: str) -> Weights:
        """Trainable weights as fp32 arrays: PEFT state-dict names for a LoRA, model parameter names else."""
        with self._lock:
            return self._model(policy).weights(keep=self._group.rank == 0)

    def adopt(self, policy: str, weights: Weights) -> None:
        """Replace the weights of a policy. The optimizer keeps its state. The names are the ones that the method
        `weights` returns.

        Raises RunError for a missing name or another shape.
        """
        with self._lock:
            model = self._model(policy)
            shapes = {name: tuple(tensor.shape) for name, tensor in model.state().items()}
            if shapes != {name: array.shape for name, array in weights.items()}:
                raise RunError(
                    f"The weights are of another shape than those of policy {policy!r}.",
                    "Give them the rank and the layers that `lora` names.",
                )
            model.load({name: torch.from_numpy(np.array(array)) for name, array in weights.items()})

    def begin_profile(self) -> None:
        """See `Learner.begin_profile`. The trace has all threads of this process, so an engine in it too."""
        self.end_profile(None)  # the profiler of an interrupted step may be left
        self._profiler = torch_trace.begin()

    def end_profile(self, file: Path | None) -> None:
        profiler = self._profiler
        self._profiler = None
        if profiler is not None:
            torch_trace.end(profiler, file)

    def save(self, folder: Path) -> None:
        """Write `learner.json`, and weights, optimizer and row order per policy (see `files`)."""
        with self._lock:
            if self._group.rank == 0:
                files.write_identity(folder, [policy.spec for policy in self._policies.values()])
            self.save_policies(folder)

    def save_policies(self, folder: Path) -> None:
        """Write weights, optimizer and row order of each policy."""
        with self._lock:
            for name, policy in self._policies.items():
                files.write_weights(folder, policy, self._group)
                files.write_optimizer(folder, policy, self._optimizers[name])
                if self._group.rank == 0:
                    if name in self._critic:
                        files.write_critic(folder, policy, self._critic.state(name))
                    files.write_progress(folder, policy, self._order[name], self._gradient_checks[name].steps)

    def load(self, folder: Path, new: Collection[str] = ()) -> None:
        """Restore what `save` wrote, here or in a learner of several processes, but for policies that are `new`. Raises
        RunError when it is missing, broken, or of other policies."""
        files.check_identity(folder, [p.spec for name, p in self._policies.items() if name not in new])
        self.load_policies(folder, new)

    def load_policies(self, folder: Path, new: Collection[str] = ()) -> None:
        """Restore weights, optimizer and row order of each policy that is not `new`."""
        with self._lock, files.errors_of_folder(folder):
            for name, policy in self._policies.items():
                if name in new:
                    continue
                files.read_weights(folder, policy)
                files.read_optimizer(folder, policy, self._optimizers[name])
                if name in self._critic:
                    self._critic.load(name, files.read_critic(folder, policy))
                self._gradient_checks[name].steps = files.read_progress(folder, policy, self._order[name])
                if self._gradient_checks[name].steps and not self._optimizers[name].state:
                    raise RunError(f"{folder} holds no optimizer state of {name!r}.", "Use another checkpoint.")

    def _micro_batches(self, model: PolicyModel, rows: Sequence[TrainRow], batch: Sequence[int]) -> list[list[int]]:
        """This rank's passes over a batch, each a list of row numbers. All ranks make the same number of passes, so the
        last ones may have no rows."""
        group = self._group
        longest = max((len(tokens_of(rows[i])) for i in batch), default=0)
        shared = model.logprob_model.shares
        size = self._passes[model.spec.name]
        plan = PassPlan(rows, batch, shared)
        # Decided by the tokens of all ranks, so that all ranks decide the same.
        model.logprob_model.checkpointing.on = size.choose(longest, plan.computed)
        if group.size == 1:
            return plan.passes(size.tokens)
        return passes_of_rank(rows, batch, size.tokens, shared=shared, rank=group.rank, size=group.size)

    def _logprobs_before(
        self, model: PolicyModel, tokens: UpdateTokens, split: Batches, passed: Sequence[bool]
    ) -> Tensor | None:
        """log pi before the update, [N]. It is NaN (or None for all tokens) if no pass is needed before the first step.

        The first mini-batch needs none: its own passes compute the same, as the weights have not changed yet. A loss
        with a mask needs log pi of all rows, also of rows that are not `passed`. The passes are the same as in the
        update, because other passes round differently in bfloat16.
        """
        rows = tokens.rows
        has_mask = tokens.loss.mask != "none"
        first_batch = [] if has_mask else split[0]
        batches = [[i for i in batch if passed[i]] for batch in split if batch is not first_batch]
        if has_mask:
            batches.append([i for i in range(len(rows)) if not passed[i]])
        if not any(batches):
            return None
        logprobs = self._logprobs(model, rows, [batch for batch in batches if batch])
        in_first_batch = torch.isin(tokens.row, torch.tensor(first_batch).long()).to(logprobs.device)
        return logprobs.masked_fill_(in_first_batch, torch.nan)

    def _logprobs(self, model: PolicyModel, rows: Sequence[TrainRow], batches: Batches) -> Tensor:
        """log pi_train of the response tokens, [N], in the passes of `batches`. Each rank computes a part, and the sum
        over ranks has all."""
        lengths = lengths_of(rows)
        logprobs = torch.zeros(sum(lengths), device=model.device)
        parts = logprobs.split(lengths)
        for number, logprobs_of_row in self._map_responses(model, rows, batches, model.logprobs):
            parts[number].copy_(logprobs_of_row)
        return self._group.sum(logprobs)

    def _map_responses(
        self,
        model: PolicyModel,
        rows: Sequence[TrainRow],
        batches: Batches,
        compute: Callable[[PassInputs], Tensor],
    ) -> Iterator[tuple[int, Tensor]]:
        """Apply `compute` to the passes over this rank's part of the rows. Yields each row's number, and the result for
        its response tokens."""
        micros = [micro for batch in batches for micro in self._micro_batches(model, rows, batch)]
        ahead = prepared_ahead(lambda micro: model.logprob_model.prepare([rows[i] for i in micro]), micros)
        for micro, inputs in zip(micros, ahead, strict=True):
            values = compute(inputs)
            yield from zip(micro, values.split(lengths_of(inputs.rows)) if micro else (), strict=True)

    def _count_skipped(self, update: Update, batch: Sequence[int]) -> None:
        """Count the rows of a mini-batch that no pass computes."""
        skipped = [i for i in batch if not update.passed[i]]
        tokens = update.tokens
        if skipped and self._group.rank == 0:
            at = tokens.at(skipped)
            at = at[tokens.counted[at]]
            update.sums.skip(tokens.row[at], to_device(tokens.sampler[at], update.model.device))

    def _backward(self, update: Update, batch: Sequence[int]) -> Tensor:
        """Add up the gradients of one mini-batch (numbers of rows). Returns this rank's part of its loss.

        The loss stays on the device, so that the host queues all passes of a step without waiting for them.
        """
        model = update.model
        tokens = update.tokens
        loss = update.tokens.loss
        total = torch.zeros((), dtype=torch.float64, device=model.device)
        done = []
        passed = [i for i in batch if update.passed[i]]
        micros = self._micro_batches(model, tokens.rows, passed) if passed else [[]]

        def prepare(micro: Sequence[int]) -> PassInputs:
            return model.logprob_model.prepare([tokens.rows[i] for i in micro])

        ahead = prepared_ahead(prepare, micros)
        for number, (micro, inputs) in enumerate(zip(micros, ahead, strict=True)):
            model.logprob_model.reduce_next(number == len(micros) - 1)
            if not micro:  # no rows are left here, but FSDP's exchanges need every rank
                if loss.needs_untrained:
                    model.reference_logprobs([])
                (model.token_logprobs([])[0].sum() * 0.0).backward()
                continue
            untrained = model.reference_logprobs(inputs) if loss.needs_untrained else None
            new, entropy = model.token_logprobs(inputs)
            pass_tokens = tokens.of_pass(micro, update.weight, new=new, entropy=entropy, untrained=untrained)
            pass_tokens.new.retain_grad()
            parts = policy_loss(loss, pass_tokens)
            parts.loss.backward()
            total += parts.loss.detach()
            new_gradient = pass_tokens.new.grad
            slope = torch.zeros_like(pass_tokens.new) if new_gradient is None else new_gradient
            parts = parts._replace(loss=parts.loss.detach())
            done.append((micro, pass_tokens.detached(), parts, slope, inputs.computed))
        # The metrics are computed after all passes, so that they do not delay a pass.
        for micro, pass_tokens, parts, slope, computed in done:
            temperature = to_device(tokens.temperatures(micro), pass_tokens.new.device)
            gradients = logit_gradients(slope, pass_tokens.new, temperature)
            update.sums.add(micro, pass_tokens, parts, gradients, computed=computed)
            tokens.note(micro, pass_tokens)
        return total

    def _step(self, policy: str, lr_scale: float, *, moves: bool) -> float:
        """Take one optimizer step on the present gradients. Returns their norm before clipping.

        Gradients that are not finite are not applied. Gradients of zero are not applied either, so that momentum alone
        moves no weight.
        """
        model = self._policies[policy]
        optimizer = self._optimizers[policy]
        settings = self._methods[policy].settings
        norm = clip_gradients([p for p in model.parameters().values() if p.grad is not None], settings.grad_clip)
        if np.isfinite(norm):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(model, settings) * lr_scale
            checks = self._gradient_checks[policy]
            checked = moves and lr_scale > 0 and bool(checks.pending)
            if checked:
                checks.before_step()
            if norm > 0.0:
                optimizer.step()
            if checked:
                checks.after_step()
        optimizer.zero_grad(set_to_none=True)
        return norm

    def _model(self, policy: str) -> PolicyModel:
        if policy not in self._policies:
            raise ConfigError("policy", policy, f"is not a trained policy: {sorted(self._policies)}")
        return self._policies[policy]
