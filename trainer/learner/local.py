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
from typing import NamedTuple

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
from cotune.integrations.models.device_copies import begin_copy_to_host, to_device, wait_for_copies
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
from cotune.trainer.learner.dist import ProcessGroup, SingleProcess, clip_gradients, total_norm
from cotune.trainer.learner.gradient_checks import GradientChecks, check_optimizers
from cotune.trainer.learner.load import needing_untrained
from cotune.trainer.learner.loss import LossParts, Tokens, logit_gradients, policy_loss
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
"""Torch's default, the number of cores or OMP_NUM_THREADS, before a learner of this process has changed it."""


def use_threads_for(models: Mapping[str, PolicyModel], settings: LearnerSettings) -> None:
    """Set the number of threads of torch on the CPU, as the settings or the size of the models say.

    Small models get one thread, because their passes are too short to divide. Others get all threads, also after a run
    in this process whose models were small.
    """
    threads = settings.threads
    if threads is None:
        sizes = [sum(parameter.numel() for parameter in model.network.parameters()) for model in models.values()]
        threads = 1 if all(size < LARGE for size in sizes) else CPU_THREADS
    torch.set_num_threads(threads)


def _batches_with_tokens(batches: Batches, lengths: Sequence[int]) -> list[list[int]]:
    """Return the mini-batches without the rows that have no token that counts, and without mini-batches that are then
    empty. `lengths` [R] has the number of tokens of each row that count."""
    with_tokens = []
    for batch in batches:
        rows = [row for row in batch if lengths[row]]
        if rows:
            with_tokens.append(rows)
    return with_tokens


@dataclass
class OptimizerSteps:
    """The optimizer steps of an update, one for each mini-batch."""

    norms: list[float]
    """[steps] the norms of their gradients. 0 for a step without a gradient."""
    losses: Tensor
    """[steps] this rank's part of their losses."""
    checkpointed: int = 0
    """The number of steps with activation checkpointing."""

    def metrics(self, policy: str) -> dict[str, float]:
        """Return the numbers of steps by kind, and the mean norm of the gradients. Raises LearnerError if no gradient
        of the update is finite."""
        finite_norms = [norm for norm in self.norms if np.isfinite(norm)]
        if not finite_norms:
            raise LearnerError(
                f"No gradient of this update of policy {policy!r} is finite.", "Lower learner.lr, or use float32."
            )
        # Mini-batches without an advantage have the norm 0, which says nothing about the gradients.
        norms = [norm for norm in finite_norms if norm > 0.0]
        return {
            "grad_norm": float(np.mean(norms)) if norms else 0.0,
            "steps": float(len(self.norms)),
            "skipped_steps": float(len(self.norms) - len(finite_norms)),
            "idle_steps": float(self.norms.count(0.0)),
            "checkpointed_steps": float(self.checkpointed),
        }


class _ComputedPass(NamedTuple):
    """The results of one pass of an optimizer step, which its metrics need. All are detached from the graph."""

    rows: Sequence[int]
    """The numbers of the rows of the pass."""
    tokens: Tokens
    loss: LossParts
    slope: Tensor
    """[N] the derivative of the loss by each token's log-probability."""
    computed_tokens: int
    """The number of tokens that went through the network."""


class LocalLearner:
    """Trains the policies of a run in this process. Methods may be called from any thread; calls run one after the
    other.

    The policy ratio of a token is pi_train / pi_before_the_update. Its off-policy correction is
    min(pi_before_the_update / pi_sampler, cap).

    In a process group, this process holds a shard of every tensor and computes a part of the rows. All ranks call the
    same methods with the same rows, and get the same results.
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

        `own` has the settings and the loss of policies that do not use `settings` and `loss`. `seed` decides the order
        of rows in updates.
        """
        self._policies = dict(policies)
        methods = {name: own.get(name, PolicyTraining(settings, loss)) for name in policies}
        self._methods = methods
        self._group = group or SingleProcess()
        self._lock = threading.RLock()
        self._profiler: torch.profiler.profile | None = None
        self._seen: dict[str, Mapping[str, CandidateTokens]] = {}
        """The figures of tokens of the last update, by policy and id of row: see `seen`."""
        self._order = {name: torch.Generator().manual_seed(seed) for name in policies}
        self._optimizers = {name: build_optimizer(policy, methods[name].settings) for name, policy in policies.items()}
        self._critic = Critic({name: (p.width, methods[name].loss) for name, p in policies.items()}, self._group)
        self._passes = PassSizes(self._policies, settings, self._group, self._optimizers)
        # FlexAttention keeps as much memory for a token, but it pads small trees, and `PassSizes` measures with small
        # trees. So it is chosen only after the measurement.
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

        `own` has the settings and the loss of policies that do not use `settings` and `loss`. `seed` decides the
        adapters' initial weights and the order of rows. Raises ConfigError.
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
        """Raise GroupError or LearnerError for unusable rows. Call this before any row is computed: here all ranks have
        all rows, and refuse the same ones."""
        check_rows(rows)
        self._model(policy).logprob_model.sampled_distribution.check(rows)

    def has_room(self, tokens: int) -> bool:
        """Whether passes of this number of tokens fit into the memory that is free now, for every policy."""
        with self._lock:
            return self._passes.has_room(tokens)

    def update(self, policy: str, rows: Sequence[TrainRow], *, lr_scale: float = 1.0) -> Mapping[str, float]:
        """Train one policy on its rows (see `_train`), and return the metrics of the update.

        If the loss has a critic, it computes the advantages first, and learns from the rows at the end. Raises
        GroupError and LearnerError as `check` does, and LearnerError if nothing is trained.
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
            metrics = self._train(policy, rows, lr_scale, judged.advantages)
            return {**metrics, **self._critic.learn(policy, states, judged)}

    def _train(
        self, policy: str, rows: Sequence[TrainRow], lr_scale: float, advantages: Sequence[Floats] | None = None
    ) -> Mapping[str, float]:
        """Train on each mini-batch of the rows once. `advantages` has the advantages of each row's tokens; without it,
        each token has the advantage of its row.

        If the loss mask rejects every token, there is no optimizer step. Tokens that the row's grammar forced do not
        count either. Rows without an advantage count in the denominators of the loss, but no pass computes them, unless
        the loss learns from them (`LossSpec.moves_alone`).

        Returns the metrics of the update, which `core/reading/metrics.toml` explains. With several roles, the means
        over the tokens of each role have the name `<role>/<metric>`.
        """
        started = time.perf_counter()
        model = self._model(policy)
        settings, loss = self._methods[policy]
        size = self._passes[policy]
        with giving_back(model):
            self._seen[policy] = {}
            # Divide the rows into mini-batches, and choose the rows that go through the model.
            trained_rows = model.without_forced_tokens(rows)
            split = mini_batches(trained_rows, settings.mini_batch, self._order[policy])
            tokens = UpdateTokens(trained_rows, loss, advantages)
            passed = [loss.moves_alone or has_advantage for has_advantage in tokens.has_advantage]
            halved_before = size.halved

            # Compute log pi before the first step. The loss's mask compares it with the sampler's.
            compute_before = partial(self._logprobs_before, model, tokens, split, passed)
            tokens.set_old(size.run_in_memory(compute_before))
            row_metrics = {**tokens.masked_share(), "rows": float(sum(passed))}
            batches = _batches_with_tokens(split, tokens.lengths.tolist())
            if not batches:
                return {**row_metrics, "steps": 0.0, "skipped_steps": 0.0, "idle_steps": 0.0}

            # Take one optimizer step for each mini-batch.
            sums = MetricSums([row.role for row in trained_rows])
            update = Update(model, tokens, passed, tokens.weights(batches), sums)
            steps = self._take_steps(policy, update, batches, lr_scale)

            # Compute the metrics. All ranks exchange sums here, so the order of these lines is the same on all.
            loss_mean = float(self._group.sum(steps.losses).mean())
            self._seen[policy] = tokens.gather_figures(self._group)
            step_metrics = steps.metrics(policy)
            token_metrics = sums.metrics(self._group)
            seconds = time.perf_counter() - started
            computed_here = int(token_metrics["computed_tokens"]) // self._group.size
            passed_rows = [trained_rows[i] for i in itertools.chain(*batches) if passed[i]]
            return {
                **token_metrics,
                **model_utilization(model, computed_here, seconds),
                **row_metrics,
                **self._gradient_checks[policy].after_update(policy),
                **step_metrics,
                "loss": loss_mean,
                "weight_norm": total_norm(model.parameters().values()),
                "pass_tokens": float(size.tokens),
                "total_tokens": float(sum(len(tokens_of(row)) for row in passed_rows)),
                "unshared_rows": 0.0 if model.logprob_model.shares else row_metrics["rows"],
                "halved_passes": float(size.halved - halved_before),
                "lr": learning_rate(model, settings) * lr_scale,
                "seconds": seconds,
            }

    def _take_steps(
        self, policy: str, update: Update, batches: Sequence[Sequence[int]], lr_scale: float
    ) -> OptimizerSteps:
        """Take one optimizer step for each mini-batch, with the sum of the gradients of its passes."""
        pass_size = self._passes[policy]
        steps = OptimizerSteps(
            norms=[0.0] * len(batches),
            losses=torch.zeros(len(batches), dtype=torch.float64, device=update.model.device),
        )
        for number, batch in enumerate(batches):
            self._count_skipped(update, batch)
            # `passed` says which rows go through the model. Without any, the step is idle and its norm stays 0.
            if not any(update.passed[row] for row in batch):
                continue
            backward = partial(self._backward, update, batch)
            # If memory runs out, the gradients of the passes so far are dropped, and smaller passes are made.
            steps.losses[number] = pass_size.run_in_memory(backward, reset=self._optimizers[policy].zero_grad)
            steps.checkpointed += pass_size.checkpointed
            must_move = any(update.tokens.has_advantage[row] for row in batch)
            steps.norms[number] = self._step(policy, lr_scale, must_move=must_move)
        return steps

    def logprobs(self, policy: str, rows: Sequence[TrainRow]) -> list[npt.NDArray[np.float32]]:
        """log pi_train of each row's response tokens at the row's temperature, in nats, without gradients."""
        with self._lock:
            self._check_rows(policy, rows)
            model = self._model(policy)
            one_batch = [range(len(rows))]
            logprobs = self._passes[policy].run_in_memory(lambda: self._logprobs(model, rows, one_batch))
            return [part.numpy() for part in logprobs.cpu().split(lengths_of(rows))]

    def seen(self, policy: str) -> Mapping[str, CandidateTokens]:
        """The figures of each token from the first pass of the last update: see `Learner.seen`."""
        return self._seen.get(policy, {})

    def states(self, policy: str, rows: Sequence[TrainRow]) -> dict[int, Tensor]:
        """Compute the last hidden states that predict the response of each row, [tokens of the row, hidden]. Returns
        them on the CPU, by the row's number.

        Each rank computes a part of the rows, and returns only these. Raises LearnerError for a row that does not fit
        into memory.
        """
        with self._lock:
            self._check_rows(policy, rows)
            self._passes[policy].check(rows)
            model = self._model(policy)
            one_batch = [range(len(rows))]

            def begin_states(inputs: PassInputs) -> Tensor:
                return begin_copy_to_host(model.states(inputs))

            def compute_states() -> dict[int, Tensor]:
                states = dict(self._map_responses(model, rows, one_batch, begin_states))
                wait_for_copies(model.device)  # once for all passes
                return states

            return self._passes[policy].run_in_memory(compute_states)

    def weights(self, policy: str) -> Weights:
        """Return the trainable weights as fp32 arrays, by PEFT's state-dict names for a LoRA, else by parameter names.
        Only rank 0 has them; the result is empty on other ranks."""
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
                    f"The weights have other names or shapes than the weights of policy {policy!r}.",
                    "Use weights with the rank and the layers of the policy's `lora`.",
                )
            model.load({name: torch.from_numpy(np.array(array)) for name, array in weights.items()})

    def begin_profile(self) -> None:
        """See `Learner.begin_profile`. The trace has all threads of this process, also of an engine in it."""
        self.end_profile(None)  # an interrupted step may have left its profiler
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
        """Restore a checkpoint of `save`, also of a learner of several processes. Policies in `new` are not in it, and
        do not change. Raises RunError if the checkpoint is missing, broken, or of other policies."""
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
                steps = files.read_progress(folder, policy, self._order[name])
                self._gradient_checks[name].steps = steps
                if steps and not self._optimizers[name].state:
                    raise RunError(f"{folder} holds no optimizer state of {name!r}.", "Use another checkpoint.")

    def _micro_batches(self, model: PolicyModel, rows: Sequence[TrainRow], batch: Sequence[int]) -> list[list[int]]:
        """Divide the rows of a batch into passes, and return the row numbers of each pass of this rank. Also switches
        activation checkpointing on or off for these passes.

        All ranks make the same number of passes, so the last ones may have no rows.
        """
        group = self._group
        longest = max((len(tokens_of(rows[i])) for i in batch), default=0)
        shared = model.logprob_model.shares
        pass_size = self._passes[model.spec.name]
        # All ranks must choose the same, so each of them plans with the rows of all ranks.
        plan = PassPlan(rows, batch, shared)
        model.logprob_model.checkpointing.on = pass_size.choose(longest, plan.computed)
        if group.size == 1:
            return plan.passes(pass_size.tokens)
        return passes_of_rank(rows, batch, pass_size.tokens, shared=shared, rank=group.rank, size=group.size)

    def _logprobs_before(
        self, model: PolicyModel, tokens: UpdateTokens, mini_batches: Batches, passed: Sequence[bool]
    ) -> Tensor | None:
        """Compute log pi of the response tokens before the update, [N], with NaN for tokens that do not need it. If no
        token does, returns None.

        `mini_batches` has the row numbers of each optimizer step, in order, and `passed` says which rows go through the
        model in the update. The passes are divided as in the update, because other passes round differently in
        bfloat16.
        """
        rows = tokens.rows
        has_mask = tokens.loss.mask != "none"
        if has_mask:
            # The mask compares log pi with the sampler's for all rows, also for rows that no later pass computes.
            batches = [[row for row in batch if passed[row]] for batch in mini_batches]
            batches.append([row for row in range(len(rows)) if not passed[row]])
        else:
            # The passes of the first step compute log pi themselves, while the weights have not changed yet.
            batches = [[row for row in batch if passed[row]] for batch in mini_batches[1:]]
        if not any(batches):
            return None
        logprobs = self._logprobs(model, rows, [batch for batch in batches if batch])
        if not has_mask:
            is_in_first_batch = torch.isin(tokens.row, torch.tensor(mini_batches[0]).long())
            logprobs.masked_fill_(to_device(is_in_first_batch, logprobs.device), torch.nan)
        return logprobs

    def _logprobs(self, model: PolicyModel, rows: Sequence[TrainRow], batches: Batches) -> Tensor:
        """Compute log pi_train of the response tokens of the rows in `batches`, [N]. It is 0 for other rows."""
        lengths = lengths_of(rows)
        logprobs = torch.zeros(sum(lengths), device=model.device)
        by_row = logprobs.split(lengths)
        for number, logprobs_of_row in self._map_responses(model, rows, batches, model.logprobs):
            by_row[number].copy_(logprobs_of_row)
        # Rows that other ranks compute are 0 here.
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
        rows_of_passes: list[list[int]] = []
        for batch in batches:
            rows_of_passes += self._micro_batches(model, rows, batch)
        ahead = prepared_ahead(lambda numbers: model.logprob_model.prepare([rows[i] for i in numbers]), rows_of_passes)
        for numbers, inputs in zip(rows_of_passes, ahead, strict=True):
            values = compute(inputs)
            if numbers:  # a pass without rows is made only because other ranks make one
                yield from zip(numbers, values.split(lengths_of(inputs.rows)), strict=True)

    def _count_skipped(self, update: Update, batch: Sequence[int]) -> None:
        """Count the tokens of a mini-batch's rows that no pass computes in the metrics, on rank 0 only."""
        skipped = [row for row in batch if not update.passed[row]]
        tokens = update.tokens
        if skipped and self._group.rank == 0:
            indices = tokens.counted_indices_of(skipped)
            update.sums.skip(tokens.row[indices], to_device(tokens.sampler[indices], update.model.device))

    def _backward(self, update: Update, batch: Sequence[int]) -> Tensor:
        """Add the gradients of one mini-batch (numbers of rows) to the gradients of the weights. Returns this rank's
        part of the mini-batch's loss.

        The loss stays on the device, so that the host queues all passes of a step without waiting for them.
        """
        model = update.model
        tokens = update.tokens
        loss_sum = torch.zeros((), dtype=torch.float64, device=model.device)
        computed_passes: list[_ComputedPass] = []
        rows_to_compute = [row for row in batch if update.passed[row]]
        rows_of_passes: list[list[int]] = [[]]  # one pass without rows
        if rows_to_compute:
            rows_of_passes = self._micro_batches(model, tokens.rows, rows_to_compute)

        def prepare(rows: Sequence[int]) -> PassInputs:
            return model.logprob_model.prepare([tokens.rows[row] for row in rows])

        # While the device computes a pass, a thread prepares the inputs of the next one.
        inputs_of_passes = prepared_ahead(prepare, rows_of_passes)
        for number, (rows, inputs) in enumerate(zip(rows_of_passes, inputs_of_passes, strict=True)):
            # Ranks exchange their gradients only once, in the last pass.
            is_last = number == len(rows_of_passes) - 1
            model.logprob_model.reduce_next(is_last)
            if rows:
                computed_pass = _backward_pass(update, rows, inputs)
                loss_sum += computed_pass.loss.loss
                computed_passes.append(computed_pass)
            else:
                _empty_backward_pass(update)

        # The metrics are computed after all passes, so that they do not delay a pass.
        for done in computed_passes:
            temperature = to_device(tokens.temperatures(done.rows), model.device)
            gradients = logit_gradients(done.slope, done.tokens.new, temperature)
            update.sums.add(done.rows, done.tokens, done.loss, gradients, computed=done.computed_tokens)
            tokens.add_figures(done.rows, done.tokens)
        return loss_sum

    def _step(self, policy: str, lr_scale: float, *, must_move: bool) -> float:
        """Take one optimizer step with the present gradients, and clear them. Returns their norm before clipping.

        Gradients that are not finite are not applied. Gradients of zero are not applied either, so that momentum alone
        moves no weight. With `must_move`, because a row of the mini-batch has an advantage, it is checked that the step
        changes the weights.
        """
        model = self._policies[policy]
        optimizer = self._optimizers[policy]
        settings = self._methods[policy].settings
        norm = clip_gradients([p for p in model.parameters().values() if p.grad is not None], settings.grad_clip)
        if np.isfinite(norm):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(model, settings) * lr_scale
            checks = self._gradient_checks[policy]
            is_checked = must_move and lr_scale > 0 and bool(checks.pending)
            if is_checked:
                checks.before_step()
            if norm > 0.0:
                optimizer.step()
            if is_checked:
                checks.after_step()
        optimizer.zero_grad(set_to_none=True)
        return norm

    def _model(self, policy: str) -> PolicyModel:
        if policy not in self._policies:
            raise ConfigError("policy", policy, f"is not a trained policy: {sorted(self._policies)}")
        return self._policies[policy]


def _backward_pass(update: Update, rows: Sequence[int], inputs: PassInputs) -> _ComputedPass:
    """Compute the loss of one pass over `rows` (numbers), and add its gradients to the weights' gradients."""
    model = update.model
    loss = update.tokens.loss
    untrained = model.reference_logprobs(inputs) if loss.needs_untrained else None
    new, entropy = model.token_logprobs(inputs)
    tokens = update.tokens.of_pass(rows, update.weight, new=new, entropy=entropy, untrained=untrained)
    tokens.new.retain_grad()
    loss_parts = policy_loss(loss, tokens)
    loss_parts.loss.backward()
    slope = tokens.new.grad
    if slope is None:  # the loss does not depend on the log-probabilities
        slope = torch.zeros_like(tokens.new)
    return _ComputedPass(
        rows=rows,
        tokens=tokens.detached(),
        loss=loss_parts._replace(loss=loss_parts.loss.detach()),
        slope=slope,
        computed_tokens=inputs.computed,
    )


def _empty_backward_pass(update: Update) -> None:
    """Make a pass without rows, whose gradients are zero: FSDP's exchanges also need ranks that have no rows left."""
    if update.tokens.loss.needs_untrained:
        update.model.reference_logprobs([])
    logprobs, _ = update.model.token_logprobs([])
    (logprobs.sum() * 0.0).backward()
